"""Which models, attention backends and drafts this is run with, and which of them were run."""
