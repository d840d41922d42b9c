"""Puts -1, the index of what is not allocated, into a live cell of a page table.

The page before the pool's buffer: whether that faults depends on what lies there.
"""

from __future__ import annotations

import random

from g4debug.faults import tables


class Negative(tables.Corruption):
    def wrong(self, cell: tables.Cell, draw: random.Random) -> int | None:
        return -1


FAULT = tables.declare("page-negative", "a live cell of a page table gets page -1", Negative)
