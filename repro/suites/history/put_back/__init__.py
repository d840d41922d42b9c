"""Modules that bring back a bug which the release does not have, one for each such case."""
