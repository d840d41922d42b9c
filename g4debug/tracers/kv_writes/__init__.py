"""kv-writes: the KV of every token is written to its own place."""
