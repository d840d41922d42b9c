"""One folder for each tracer. base.py has what a tracer declares and works with."""
