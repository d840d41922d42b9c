"""The machinery of the history suite; the cases are in ``repro/history``."""
