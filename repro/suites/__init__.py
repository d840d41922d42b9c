"""The suites: what matrix.py, healthy.py, fuzz.py, ranks.py and history_suite.py are made of."""
