"""One server and its traffic, drawn at random."""
