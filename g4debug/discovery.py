"""Finding tracers, faults, fixes and subcommands by the files that are there.

One item is one module; its public id is the module's name with ``-`` for ``_``
(``page_table.py`` -> ``page-table``). Names are read off the folder without importing
anything, so that a typo in the environment is caught before SGLang is loaded.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

INFRASTRUCTURE = {"g4debug.faults": ("grammar", "base"), "g4debug.tracers": ("base",)}


@cache
def names(package: str) -> tuple[str, ...]:
    """Public ids of the items in ``package``, sorted."""
    module = importlib.import_module(package)
    skip = INFRASTRUCTURE.get(package, ())
    return tuple(
        sorted(
            m.name.replace("_", "-")
            for m in pkgutil.iter_modules(module.__path__)
            if not m.name.startswith("_") and m.name not in skip and not m.ispkg
        )
    )


def load(package: str, name: str, attribute: str) -> Any:
    """The declared object (``FIX``, ``FAULT``, ``TRACER``) of one item.

    Raises AttributeError if the module does not declare it, ValueError if it declares
    another id than its file name: both are mistakes of the item's author.
    """
    module = importlib.import_module(f"{package}.{name.replace('-', '_')}")
    item = getattr(module, attribute)
    if item.id != name:
        raise ValueError(f"{module.__name__}: id is {item.id!r}, expected {name!r} (the file name)")
    return item
