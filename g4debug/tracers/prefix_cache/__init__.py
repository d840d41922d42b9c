"""prefix-cache: checks the pages that the prefix cache gets, and those that it hands out."""
