"""The workloads of ``repro/healthy.py`` for healthy servers, group by group.

A module here holds workloads that belong together, in ``GROUPS``. The workloads of a group run one
after the other on the same engine.
"""

from __future__ import annotations

import importlib
import pkgutil

from suites.healthy.workload import Group


def groups() -> dict[str, Group]:
    """All groups by id, module by module."""
    found: dict[str, Group] = {}
    for info in pkgutil.iter_modules(__path__):
        for group in importlib.import_module(f"{__name__}.{info.name}").GROUPS:
            assert group.id not in found, group.id
            found[group.id] = group
    return found


def group_of(name: str) -> Group:
    """Raises KeyError if there is no such group."""
    return groups()[name]
