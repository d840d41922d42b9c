"""Fixes for SGLang, one file each; installed as ``g4debug.fixes``."""
