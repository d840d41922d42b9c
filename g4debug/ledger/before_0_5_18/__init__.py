"""Ledger code for SGLang releases before 0.5.18 only. Delete it together with their support.

Nothing else imports it: ``older_module`` finds it.
"""
