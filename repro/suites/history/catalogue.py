"""Finds the cases: one module each in ``repro/history``, with its ground truth beside it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from _history.case import Case

HERE = Path(__file__).resolve().parents[1] / "history"


def truth_of(name: str) -> str:
    """The module that counts for a case."""
    return f"history.truth.{name.replace('-', '_')}"


@cache
def case_of(name: str) -> Case:
    """Raises ModuleNotFoundError if there is no such case."""
    found = importlib.import_module(f"history.{name.replace('-', '_')}").CASE
    assert isinstance(found, Case), name
    return found


def cases() -> dict[str, Case]:
    """name -> case, in the order of the table. A name is a module's, with ``-`` for ``_``."""
    modules = [m.name for m in pkgutil.iter_modules([str(HERE)]) if not m.ispkg]
    names = [name.replace("_", "-") for name in modules]
    return dict(sorted(((n, case_of(n)) for n in names), key=lambda item: item[1].number))
