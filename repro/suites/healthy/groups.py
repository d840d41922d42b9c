"""Finds the groups of workloads: those of every module of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from _healthy.workload import Group


def groups() -> dict[str, Group]:
    """All groups by id, module by module."""
    found: dict[str, Group] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"_healthy.{info.name}")
        for group in getattr(module, "GROUPS", ()):
            assert group.id not in found, group.id
            found[group.id] = group
    return found


def group_of(name: str) -> Group:
    """Raises KeyError if there is no such group."""
    return groups()[name]
