"""Puts an out-of-range page into a live cell of a page table."""

from __future__ import annotations

import random
from typing import Any

from g4debug.faults import tables
from g4debug.faults.base import Injection

# Far beyond any pool: on a GPU the address must not fall into a neighbouring allocation.
FAR = 10_000_000


class OutOfRange(tables.Corruption):
    def wrong(self, cell: tables.Cell, draw: random.Random) -> int | None:
        return FAR + draw.randrange(1000)


def corrupt(backend: Any, injection: Injection, mode: str, runner: str) -> None:
    """Overwrite live cells of ``backend.forward_metadata`` if the chain fires."""
    tables.corrupt(tables.tables_of(backend, None, None), injection, mode, runner, OutOfRange())


FAULT = tables.declare(
    "page-oob", "a live cell of a page table gets an out-of-range page", OutOfRange
)
