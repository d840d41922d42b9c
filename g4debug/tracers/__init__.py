"""One folder for each tracer. base.py has the declaration and the context of a tracer."""
