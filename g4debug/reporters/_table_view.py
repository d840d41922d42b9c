"""What a page map shows: which cells are live or bad, and the part around the bad cell.

Only the visible part of a table is turned into Python numbers. The rest stays in torch, so that
256 rows of 2048 columns take milliseconds. The record is not trusted: its numbers may come from a
damaged file, so each is clamped before it is put into an int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.findings.record import Table

BIG = 1 << 60  # larger than any real number here, and adding to it does not overflow


def clamp(value: int, low: int = 0, high: int = BIG) -> int:
    return max(low, min(value, high))


@dataclass(frozen=True)
class Cell:
    """One visible cell. ``kind``: good, bad, zero, outside (the window) or past (the length)."""

    kind: str
    value: int


@dataclass(frozen=True)
class BadCell:
    """A bad cell with its row and column in the whole table. ``shown``: the dump has the cell."""

    row: int
    column: int
    value: int
    shown: bool


class TableView:
    """A page table, and which of its cells are live or bad.

    live, bad: bool [rows, columns] of the part that was saved. A cell is bad if the check said so,
    or if it is live and not a page of the pool (a check may list only the first few bad cells).
    """

    def __init__(self, table: Table, focus_row: int = -1, focus_column: int = -1) -> None:
        self.table = table
        self.rows, self.columns = table.values.shape
        self.row0, self.column0 = clamp(table.row0), clamp(table.column0)
        self.rows_total = max(clamp(table.rows_total), self.row0 + self.rows)
        self.columns_total = max(clamp(table.columns_total), self.column0 + self.columns)
        self.pages = clamp(table.pool.pages)
        page_size = clamp(table.pool.page_size, 1)
        seq = table.seq_lens.clamp(min=0, max=BIG)
        # The number of columns that hold KV: ceil(seq_len / page_size), without overflow.
        self.ends = torch.where(seq > 0, (seq - 1) // page_size + 1, seq)
        absolute = torch.arange(self.columns) + self.column0
        past = absolute[None, :] >= self.ends[:, None]
        early = absolute[None, :] < table.first_live[:, None]
        self.past, self.outside = past, early & ~past
        self.live = ~past & ~early
        self.values = table.values.clone()
        self.bad = self.live & ((self.values < 0) | (self.values >= self.pages))
        self.bad_elsewhere = self._mark_listed()
        self.focus = self._focus(focus_row - self.row0, focus_column - self.column0)

    def _mark_listed(self) -> torch.Tensor:
        """Mark the cells that the check listed. Returns those that were not saved, [n, 3]."""
        bad = self.table.bad
        inside = (bad[:, 0] >= self.row0) & (bad[:, 0] < self.row0 + self.rows)
        inside &= (bad[:, 1] >= self.column0) & (bad[:, 1] < self.column0 + self.columns)
        r, c = bad[inside, 0] - self.row0, bad[inside, 1] - self.column0
        self.bad[r, c] = True
        self.values[r, c] = bad[
            inside, 2
        ]  # as the check saw it: the table may have been cleaned since
        return bad[~inside]

    def _focus(self, row: int, column: int) -> tuple[int, int]:
        """The cell in the middle of the map, counted within the saved part.

        It is the finding's cell, or else a bad one of the same row, or else the first bad one. If
        no cell is bad, the finding's cell is marked as bad.
        """
        known = 0 <= row < self.rows and 0 <= column < self.columns
        if known and not self.bad.any() and not len(self.bad_elsewhere):
            self.bad[row, column] = True
        if known and self.bad[row, column]:
            return row, column
        if 0 <= row < self.rows and self.bad[row].any():
            return row, int(self.bad[row].nonzero()[0, 0])
        first = self.bad.flatten().nonzero()[:1]
        if len(first):
            return divmod(int(first[0, 0]), self.columns)
        row = clamp(row, 0, max(0, self.rows - 1))
        return row, clamp(column, 0, max(0, self.columns - 1))

    @property
    def bad_count(self) -> int:
        return int(self.bad.sum()) + len(self.bad_elsewhere)

    def bad_cells(self, limit: int) -> list[BadCell]:
        """The first bad cells. Those that were saved come first."""
        cells = [
            BadCell(r + self.row0, c + self.column0, int(self.values[r, c]), True)
            for r, c in self.bad.nonzero()[:limit].tolist()
        ]
        rest = self.bad_elsewhere[: max(0, limit - len(cells))].tolist()
        return cells + [BadCell(r, c, v, False) for r, c, v in rest]

    def bad_rows(self, start: int, stop: int) -> int:
        """How many of the rows start..stop-1 of the saved part have a bad cell."""
        return int(self.bad[start:stop].any(dim=1).sum()) if stop > start else 0

    def extremes(self) -> tuple[int, int] | None:
        """The smallest and the largest page number in live and bad cells; None without such."""
        seen = [self.values[self.live | self.bad], self.bad_elsewhere[:, 2]]
        flat = torch.cat(seen)
        return (int(flat.min()), int(flat.max())) if len(flat) else None

    def cells(self, row: int, start: int, stop: int) -> list[Cell]:
        """The cells of one row of the saved part, columns start..stop-1."""
        part = slice(start, stop)
        return [
            Cell(_kind(bad, past, outside, value), value)
            for bad, past, outside, value in zip(
                self.bad[row, part].tolist(),
                self.past[row, part].tolist(),
                self.outside[row, part].tolist(),
                self.values[row, part].tolist(),
                strict=True,
            )
        ]

    def used_columns(self, rows: range) -> int:
        """One more than the last column of the saved part in which these rows show anything."""
        if not len(rows) or not self.columns:
            return 0
        part = slice(rows.start, rows.stop)
        busy = (~self.past[part] | self.bad[part]).any(dim=0).nonzero()
        return int(busy[-1, 0]) + 1 if len(busy) else 0


def _kind(bad: bool, past: bool, outside: bool, value: int) -> str:
    if bad:
        return "bad"
    if past:
        return "past"
    if outside:
        return "outside"
    return "zero" if value == 0 else "good"


def window(total: int, focus: int, size: int) -> range:
    """``size`` of ``total`` places, with ``focus`` in the middle unless an end is too near."""
    size = max(0, min(size, total))
    start = clamp(focus - size // 2, 0, total - size)
    return range(start, start + size)
