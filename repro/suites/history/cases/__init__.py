"""Cases of the history suite: one file each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from suites.history.case import Case


def truth_of(name: str) -> str:
    """The module that counts for a case."""
    return f"suites.history.truth.{name.replace('-', '_')}"


@cache
def case_of(name: str) -> Case:
    """Raises ModuleNotFoundError if there is no such case."""
    module = name.replace("-", "_")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), module)
    assert isinstance(found, Case), name
    return found


def cases() -> dict[str, Case]:
    """name -> case, in the order of the table. A name is a module's, with ``-`` for ``_``."""
    names = [m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__)]
    return dict(sorted(((n, case_of(n)) for n in names), key=lambda item: item[1].number))
