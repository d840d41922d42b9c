"""Puts into the last live cell of a row the page that an earlier owner of the row had there.

That happens if a row grows and its end is not written again: static tables and ``req_to_token``
keep what was there before.
"""

from __future__ import annotations

import random

from g4debug.faults import tables


class StaleTail:
    """Remembers the former content of each cell of each table."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str, int, int], tuple[int, int]] = {}  # (now, before)
        self._latest: tables.Tables | None = None

    def _see(self, of: tables.Tables) -> None:
        self._latest = of
        for name, table in of.tables.items():
            for row in of.rows:
                for column, value in enumerate(table[row, : of.columns[row]].tolist()):
                    key = (id(of.backend), name, row, column)
                    now, before = self._seen.get(key, (0, 0))
                    if value != now:
                        self._seen[key] = (value, now or before)

    def __call__(self, cell: tables.Cell, draw: random.Random) -> int | None:
        if cell.of is not self._latest:  # another forward
            self._see(cell.of)
        key = (id(cell.of.backend), cell.name, cell.row, cell.column)
        _, before = self._seen.get(key, (0, 0))
        return before if before not in (0, cell.value) else None


FAULT, install = tables.declare(
    "page-stale-tail", "a row's last live cell keeps what an earlier owner had there", StaleTail
)
