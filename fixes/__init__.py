"""Fixes for bugs of SGLang, one file each, importable as g4debug.fixes; paths/ is performance."""
