"""Every fault against every tracer."""
