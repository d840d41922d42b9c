"""yoco-fast-prefill: KV-shared layers are computed only for the rows that are read."""
