"""Handles a finding: it is written to a dump, logged, and in raise mode raised."""
