"""pool-leak: finds KV pages that nobody owns."""
