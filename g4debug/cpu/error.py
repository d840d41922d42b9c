"""What the CPU engine raises."""

from __future__ import annotations


class CpuEngineError(RuntimeError):
    """The CPU engine cannot or must not run here. The text says what to do instead."""
