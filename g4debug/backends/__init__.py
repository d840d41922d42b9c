"""One file for each attention backend: its hand-overs to a kernel, and all else known about it.

The files are found by what they declare: ``ADAPTER``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Any

from g4debug.backends.base import Adapter
from g4debug.hooking import targets


@cache
def adapters() -> tuple[Adapter, ...]:
    """All adapters, by name."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return tuple(module.ADAPTER for module in modules if hasattr(module, "ADAPTER"))


def installed() -> tuple[Adapter, ...]:
    """The adapters of the backends that SGLang can import here."""
    return tuple(found for found in adapters() if found.is_there())


def adapter(name: str) -> Adapter:
    """The adapter of this attention backend. Raises KeyError if there is none."""
    return {found.name: found for found in adapters()}[name]


def carrying(shape: type) -> tuple[Any, ...]:
    """The adapters of this shape, TableAdapter or ListAdapter, whose backends can be imported."""
    return tuple(found for found in installed() if isinstance(found, shape))


def names(of: Iterable[Adapter] | None = None) -> str:
    """The names of these adapters, or of all: ``triton or trtllm_mha``."""
    return " or ".join(found.name for found in (adapters() if of is None else of))


def adapter_of(backend: Any) -> Adapter | None:
    """The adapter for a backend object that SGLang has built. None if its class is not known."""
    # On some platforms the class cannot be imported, so the name is compared.
    built = f"{type(backend).__module__}.{type(backend).__qualname__}.__init__"
    return next((found for found in adapters() if targets.path(found.built) == built), None)
