"""The Triton kernels of the performance paths, each with its torch reference."""
