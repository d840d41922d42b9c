"""One file per attention backend: what it hands to a kernel, and where to read it."""
