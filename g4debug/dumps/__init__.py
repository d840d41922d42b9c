"""The dump files: writing, reading, and looking at a file before it is read. No sglang in here."""
