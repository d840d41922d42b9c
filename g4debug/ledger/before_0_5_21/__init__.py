"""What the ledger needs only for SGLang releases before 0.5.21. It goes when the last of them goes.

Nothing imports it, besides the folders for older releases: ``discovery.older`` finds it.
"""
