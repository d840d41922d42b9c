"""Wraps functions of SGLang: which ones, where each release has them, and in which order."""
