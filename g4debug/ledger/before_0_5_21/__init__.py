"""Ledger code for SGLang releases before 0.5.21 only. Delete it together with their support.

Nothing imports it but the folder for releases before 0.5.18: ``older_module`` finds it.
"""
