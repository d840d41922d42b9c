"""What the ledger needs only for SGLang releases before 0.5.18. It goes when the last of them goes.

Nothing imports it: ``discovery.older`` finds it.
"""
