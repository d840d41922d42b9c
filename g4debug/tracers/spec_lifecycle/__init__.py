"""spec-lifecycle: finds wrong state between draft and verify."""
