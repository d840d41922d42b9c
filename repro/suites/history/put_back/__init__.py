"""What brings a bug back that the release does not have: one module for each such case."""
