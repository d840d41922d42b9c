"""From a line of a log to the entry that explains it: entries, patterns, the reading of logs."""
