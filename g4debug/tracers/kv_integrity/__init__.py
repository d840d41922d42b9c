"""kv-integrity: nobody writes into a freed KV page, and committed KV stays as it is."""
