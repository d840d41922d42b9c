"""spec-lifecycle: batch.spec_info is what the next hand-over needs, and counts add up."""
