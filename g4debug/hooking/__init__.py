"""Where SGLang is wrapped: hook sites, their paths in each release, the order of the wrappers."""
