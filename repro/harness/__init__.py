"""What the repro scripts share: processes, variants and their verdicts, options, printing."""
