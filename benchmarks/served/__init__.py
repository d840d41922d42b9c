"""What runs in a server's processes: how it answers a benchmark, and plugins for SGLang."""
