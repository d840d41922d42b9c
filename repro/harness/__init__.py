"""Shared by the repro scripts: processes, variants and their verdicts, options, printing."""
