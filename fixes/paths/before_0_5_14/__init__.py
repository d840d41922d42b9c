"""Performance paths for SGLang before 0.5.14 only. Nothing outside of such a folder imports it."""
