"""Our own record of the holders and the events of all KV pages."""
