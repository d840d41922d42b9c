"""The Triton kernels of the performance paths."""
