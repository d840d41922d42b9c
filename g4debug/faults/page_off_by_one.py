"""Puts the page beside the right one into a live cell of a page table.

That page is inside the pool and belongs to whoever holds it.
"""

from __future__ import annotations

import random

from g4debug.faults import tables


def off_by_one(cell: tables.Cell, draw: random.Random) -> int | None:
    return cell.value - 1 if cell.value > 1 else cell.value + 1


FAULT, install = tables.declare(
    "page-off-by-one", "a live cell of a page table gets the page beside its own", off_by_one
)
