"""Fixes for bugs that SGLang has before 0.5.14 only. Nothing outside of such a folder imports it."""
