"""The fixes for bugs of SGLang, one file each, imported as g4debug.fixes.

The performance paths are in paths/.
"""
