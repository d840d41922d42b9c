"""How SGLang divides KV memory between the full pool and the SWA pool, without torch or SGLang."""
