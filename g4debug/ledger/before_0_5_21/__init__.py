"""What the ledger needs only for SGLang releases before 0.5.21. It goes when the last of them goes.

Nothing imports it but the folder for releases before 0.5.18: ``older_module`` finds it.
"""
