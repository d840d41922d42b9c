"""Our own record of who holds each KV page and what happened to it."""
