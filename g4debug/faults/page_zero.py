"""Puts the reserved page 0 into a live cell, as in a page table that was never filled."""

from __future__ import annotations

import random

from g4debug.faults import tables


def zero(cell: tables.Cell, draw: random.Random) -> int | None:
    return 0 if cell.value else None


FAULT, install = tables.declare(
    "page-zero", "a live cell of a page table gets the reserved page 0", zero
)
