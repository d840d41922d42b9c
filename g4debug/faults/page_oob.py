"""Puts an out-of-range page into a live cell of a page table."""

from __future__ import annotations

import random

from g4debug.faults import tables

# Far beyond any pool: on a GPU the address must not fall into a neighbouring allocation.
FAR = 10_000_000


def out_of_range(cell: tables.Cell, draw: random.Random) -> int | None:
    return FAR + draw.randrange(1000)


FAULT, install = tables.declare(
    "page-oob",
    "a live cell of a page table gets an out-of-range page",
    out_of_range,
    watched="page-table",
)
