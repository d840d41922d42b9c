"""One file per rendering of a record or a table; commands hand them a stream."""
