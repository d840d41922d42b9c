"""Code for a server's processes: how it answers a benchmark, and plugins for SGLang."""
