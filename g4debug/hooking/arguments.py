"""Reads an argument of a hooked call."""

from __future__ import annotations

from typing import Any


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    """The argument that was passed at position ``index``, or by ``name``."""
    return args[index] if index < len(args) else kwargs[name]


def of_init_new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """``ForwardBatch.init_new(batch, model_runner)``, which may be given the class, too."""
    given = tuple(a for a in args if not isinstance(a, type))
    return argument(given, kwargs, 0, "batch"), argument(given, kwargs, 1, "model_runner")
