"""reporters."""
