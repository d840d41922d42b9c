"""The exception of the CPU engine."""

from __future__ import annotations


class CpuEngineError(RuntimeError):
    """The CPU engine cannot or must not run here. The text says what to do instead."""
