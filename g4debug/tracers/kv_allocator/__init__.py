"""kv-allocator: finds KV pages that are handed out or freed wrongly."""
