"""Shared by the faults in lists of tokens: where they act, on which rows, and what they log.

The faults act on the device tensors that the kernel will read, once SGLang has made them
(``_metadata.py``). Row and list (full or window) are drawn at random. In a row the newest token is
changed. Padding rows stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from g4debug.backends import carrying
from g4debug.backends.base import ListAdapter
from g4debug.faults._metadata import Made, watch
from g4debug.faults.base import Asked, Fault, Injection, Install

if TYPE_CHECKING:
    import torch

TASKS = {"on": "corrupt one list"}


@dataclass(frozen=True)
class TokenList:
    """The list of one row. name: "full" or "window". It is ``indices[begin:end]``.

    indptr: of all rows; indptr[row] is ``begin``.
    """

    name: str
    row: int
    indices: torch.Tensor
    indptr: torch.Tensor
    begin: int
    end: int

    @property
    def entries(self) -> torch.Tensor:
        return self.indices[self.begin : self.end]

    @property
    def last(self) -> int:
        return int(self.indices[self.end - 1])


@dataclass(frozen=True)
class Lists:
    """The lists of one forward that have entries, of rows that belong to requests."""

    backend: Any
    every: list[TokenList]

    def other(self, of: TokenList) -> TokenList | None:
        """The list of the other name of the same row."""
        return next((x for x in self.every if x.row == of.row and x.name != of.name), None)


# Changes a list and says what it changed it to.
Change = Callable[[], str]


# What a fault does to a list. None if there is nothing that fits.
Corruption = Callable[[Lists, TokenList, random.Random], Change | None]


def put(it: TokenList, at: int, value: int) -> Change:
    """Overwrite one entry. at: its place in ``indices``."""

    def do() -> str:
        it.indices[at] = value
        return f"entry {at - it.begin} = {value}"

    return do


def lists_of(backend: Any, pairs: dict[str, tuple[Any, Any]], live: list[int]) -> Lists:
    """pairs: name -> (indices, indptr), None where there is no such list. live: the rows."""
    found = []
    for name, (indices, indptr) in pairs.items():
        if indices is None or indptr is None:
            continue
        ends = indptr.tolist()
        found += [
            TokenList(name, row, indices, indptr, ends[row], ends[row + 1])
            for row in live
            if row + 1 < len(ends) and ends[row + 1] > ends[row]
        ]
    return Lists(backend, found)


def corrupt(of: Lists, injection: Injection, mode: str, runner: str, fault: Corruption) -> None:
    """Change a list, if there is one that fits and the chain fires."""
    able = [it for it in of.every if fault(of, it, random.Random(0)) is not None]
    action = injection.fire(mode=mode, runner=runner) if able else None
    if action is None:
        return
    it = injection.random.choice(able)
    change = fault(of, it, injection.random)
    if change is not None:
        injection.log(f"{runner} {mode}: {it.name} list row {it.row} {change()}")


def _install(fault: Corruption, injection: Injection) -> None:
    """Put a fault in place, on every backend that hands over lists of tokens."""

    @watch(injection, ListAdapter)
    def act(made: Made) -> None:
        if made.mode != "capture":
            pairs = made.adapter.all_lists(made.backend, made.static)
            of = lists_of(made.backend, pairs, made.live)
            corrupt(of, injection, made.mode, made.runner, fault)


def drilled() -> str:
    """The backend on which drills strike: one that hands lists over in every phase."""
    return str(next(a.name for a in carrying(ListAdapter) if "draft" in a.phases))


def declare(
    name: str, title: str, fault: Corruption, asks: tuple[Asked, ...] = (), watched: str = ""
) -> tuple[Fault, Install]:
    """Declare a fault in lists of tokens: its FAULT, and its install."""
    declared = Fault(
        id=name,
        title=title,
        tasks=TASKS,
        caught_by=("page-table",),
        watched=watched,
        asks=("lists of tokens", *asks),
        selectors=("mode", "runner"),
        drills=("1*on@runner=target@mode=target_verify", "1*on@runner=draft@mode=decode"),
        backend=drilled(),
    )
    return declared, partial(_install, fault)
