"""One file for each attention backend: what it hands to a kernel, and where to read that.

The files are found by what they declare: ``ADAPTER``.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from g4debug.backends.base import Adapter


@cache
def adapters() -> tuple[Adapter, ...]:
    """All adapters, by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(module.ADAPTER for module in modules if hasattr(module, "ADAPTER"))


def adapter(name: str) -> Adapter:
    """The adapter of this attention backend. Raises KeyError if there is none."""
    return {found.name: found for found in adapters()}[name]
