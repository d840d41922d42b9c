"""Puts an out-of-range page into a live cell of a page table."""

from __future__ import annotations

import random
from typing import Any

from g4debug.faults import _tables
from g4debug.faults.base import Arm

# Far beyond any pool: on a GPU the address must not fall into a neighbouring allocation.
FAR = 10_000_000


class OutOfRange(_tables.Corruption):
    def wrong(self, cell: _tables.Cell, draw: random.Random) -> int | None:
        return FAR + draw.randrange(1000)


def corrupt(backend: Any, arm: Arm, mode: str, runner: str) -> None:
    """Overwrite live cells of ``backend.forward_metadata``, if the chain fires."""
    _tables.corrupt(_tables.tables_of(backend, None, None), arm, mode, runner, OutOfRange())


FAULT = _tables.declare(
    "page-oob", "a live cell of a page table gets an out-of-range page", OutOfRange
)
