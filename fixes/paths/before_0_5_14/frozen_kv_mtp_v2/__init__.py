"""FROZEN_KV_MTP on speculative decoding v2, for SGLang 0.5.12.post1. It is declared in ``fix``."""
