"""Puts -1, which stands for "not allocated", into a live cell of a page table.

The kernel then reads in front of the pool's buffer. Whether that crashes depends on the memory in
front of it.
"""

from __future__ import annotations

import random

from g4debug.faults import tables


def negative(cell: tables.Cell, draw: random.Random) -> int | None:
    return -1


FAULT, install = tables.declare(
    "page-negative", "a live cell of a page table gets page -1", negative, watched="page-table"
)
