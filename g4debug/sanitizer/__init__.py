"""Checks on the device and the truth that they compare with. Tracers with a kernel use them."""
