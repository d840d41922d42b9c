"""The suites behind matrix.py, healthy.py, fuzz.py, ranks.py and history_suite.py."""
