"""pool-leak: every page is free, cached, or some request's."""
