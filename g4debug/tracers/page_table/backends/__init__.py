"""One file for each attention backend: what it hands to a kernel, and where to read that."""
