"""Who holds each KV page, and what happened to it: our own books, fed by SGLang's allocators."""
