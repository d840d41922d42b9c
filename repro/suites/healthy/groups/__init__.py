"""The workloads of ``repro/healthy.py`` for healthy servers, group by group.

A module here holds workloads that belong together, in ``GROUPS``. The workloads of a group run one
after the other on the same engine.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from g4debug.cpu import toys
from g4debug.cpu.server import DEFAULT
from g4debug.cpu.toy import Toy
from suites.healthy.workload import Group


def groups(model: str = DEFAULT) -> dict[str, Group]:
    """The groups that a model can have by id, module by module.

    Those of another model than Gemma-4 run on each of its attention backends, unless a group has
    its own, and those with MTP without, if it has no draft.
    """
    every: list[Group] = [
        group
        for info in pkgutil.iter_modules(__path__)
        for group in importlib.import_module(f"{__name__}.{info.name}").GROUPS
    ]
    if model != DEFAULT:
        toy = toys.load(model)
        every = [one for group in every if not without(group, toy) for one in _on(group, toy)]
    found = {group.id: group for group in every}
    assert len(found) == len(every), [group.id for group in every]
    return found


def group_of(name: str, model: str = DEFAULT) -> Group:
    """Raises KeyError if there is no such group."""
    return groups(model)[name]


def left_out(model: str) -> dict[str, str]:
    """The ids of the groups that a model cannot have, and why."""
    toy = toys.load(model)
    return {name: why for name, group in groups().items() if (why := without(group, toy))}


def without(group: Group, toy: Toy) -> str:
    """Why a model cannot have a group; '' if it can."""
    if toy.id == DEFAULT:
        return ""
    if group.refused:
        return "SGLang refuses it with Gemma-4 here, and with no other model it was tried"
    if toy.arguments.get("disable_radix_cache") and not group.engine.get("disable_radix_cache"):
        return f"it has a prefix cache, and the CPU engine serves {toy.id} without one"
    backend = group.engine.get("attention_backend", toy.backends[0])
    if backend not in toy.backends:
        return f"it runs on {backend}, and the CPU engine serves {toy.id} on {toy.backends[0]}"
    return group.only


def _on(group: Group, toy: Toy) -> Iterator[Group]:
    """The group with another model, once for each attention backend."""
    title, name = group.title, group.id
    if group.mtp and not toy.draft:  # SGLang then schedules as with its draft
        title, name = title.replace("MTP", "overlap scheduling"), name.replace("mtp", "overlapped")
    own = group.engine.get("attention_backend")
    for backend in (own,) if own else toy.backends:
        first = backend in (own, toy.backends[0])
        yield replace(
            group,
            id=name if first else f"{name}-{backend}",
            title=title if own else f"{title}, on {backend}",
            engine={**group.engine, "attention_backend": backend},
            model=toy.id,
        )
