"""kv-integrity: finds KV data that was overwritten or corrupted. Opt-in."""
