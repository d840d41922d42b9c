"""Reads an argument of a hooked call."""

from __future__ import annotations

from typing import Any


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """The argument that was passed at position ``index``, or by ``name``."""
    return args[index] if index < len(args) else kwargs[name]
