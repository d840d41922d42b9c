"""Processes that are spared SGLang's import, for the scripts and for the tests."""
