"""Cases of the history suite: one file each, found by its name."""
