"""Puts another request's page into a live cell of a page table: both then read the same KV."""

from __future__ import annotations

import random

from g4debug.faults import tables


def alias(cell: tables.Cell, draw: random.Random) -> int | None:
    table, rows = cell.of.tables[cell.name], cell.of.rows
    others = [int(table[r, cell.of.columns[r] - 1]) for r in rows if r != cell.row]
    others = [page for page in others if page != cell.value]
    return draw.choice(others) if others else None


FAULT, install = tables.declare(
    "page-alias", "a live cell of a page table gets another request's page", alias
)
