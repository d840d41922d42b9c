"""How SGLang divides KV memory between the full and the SWA pool. No torch, no sglang."""
