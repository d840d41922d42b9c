"""What the ledger needs only for SGLang releases before 0.5.18. It goes when the last of them goes.

Nothing else imports it: ``older_module`` finds it.
"""
