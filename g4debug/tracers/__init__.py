"""tracers."""
