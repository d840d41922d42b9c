"""Puts a page of the full pool into the SWA pool's page table, or the other way round.

A full-pool page in the SWA table is what a missing translation leaves (see ``stale-swa-state``),
but here in a single cell.
"""

from __future__ import annotations

import random

from g4debug.faults import tables


def pool_swap(cell: tables.Cell, draw: random.Random) -> int | None:
    other = cell.of.tables.get("swa" if cell.name == "full" else "full")
    if other is None:
        return None
    page = int(other[cell.row, cell.column])
    return page if page != cell.value else None


FAULT, install = tables.declare(
    "page-pool-swap",
    "a live cell of one pool's page table gets the other pool's page",
    pool_swap,
    asks=("a SWA pool",),
)
