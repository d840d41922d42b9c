"""One folder per tracer; base.py is what a tracer declares and works with."""
