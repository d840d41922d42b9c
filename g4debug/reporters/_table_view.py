"""A page table as a report shows it: the words beside it, and the part around the bad cell.

Only the visible part of a table is turned into Python numbers. The rest stays in torch, so that
256 rows of 2048 columns take milliseconds. The record is not trusted: its numbers may come from a
damaged file, so each is clamped before it is put into an int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from g4debug.findings.record import Pool, Table

BIG = 1 << 60  # larger than any real number here, and adding to it does not overflow
MAX_COLUMNS = 400  # no terminal has room for more
MAX_DIGITS = 7  # a longer number is rounded in its cell; the list below the map has it exactly
MAX_LISTED = 4
ROWS = 12  # unless somebody asks for another number

MEANINGS = {
    "good": "page read",
    "bad": "BAD",
    "zero": "reserved page",
    "outside": "before the window",
    "past": "past the end",
}


def clamp(value: int, low: int = 0, high: int = BIG) -> int:
    return max(low, min(value, high))


def rounded(value: int) -> str:
    """The number in at most MAX_DIGITS characters; a longer one is rounded."""
    text = str(value)
    return text if len(text) <= MAX_DIGITS else f"{value:.0e}".replace("e+", "e")


def unit(table: Table) -> str:
    """What a cell names: a page, or in the lists of the triton backend a token."""
    return "token" if table.pool.page_size == 1 else "page"


def window(total: int, focus: int, size: int) -> range:
    """``size`` of ``total`` places, with ``focus`` in the middle unless an end is too near."""
    size = max(0, min(size, total))
    start = clamp(focus - size // 2, 0, total - size)
    return range(start, start + size)


class Cells:
    """Which cells of a page table are live or bad.

    values: int64 [rows, columns] of the part that was saved, as the check saw it: the table may
    have been cleaned since. live, bad, read (either of them): bool of the same shape. A cell is bad
    if the check said so, or if it is live and not a page of the pool (a check may list only the
    first few bad cells).
    focus: the cell in the middle of the map, counted within the saved part. row, column: the
    finding's cell in the whole table; -1: not known.
    """

    def __init__(self, table: Table, row: int = -1, column: int = -1) -> None:
        self.table = table
        self.rows, self.columns = table.values.shape
        self.row0, self.column0 = clamp(table.row0), clamp(table.column0)
        self.rows_total = max(clamp(table.rows_total), self.row0 + self.rows)
        self.columns_total = max(clamp(table.columns_total), self.column0 + self.columns)
        self.pages = clamp(table.pool.pages)
        page_size = clamp(table.pool.page_size, 1)
        seq = table.seq_lens.clamp(min=0, max=BIG)
        # The number of columns that hold KV: ceil(seq_len / page_size), without overflow.
        ends = torch.where(seq > 0, (seq - 1) // page_size + 1, seq)
        absolute = torch.arange(self.columns) + self.column0
        self.past = absolute[None, :] >= ends[:, None]
        early = absolute[None, :] < table.first_live[:, None]
        self.outside = early & ~self.past
        self.live = ~self.past & ~early
        self.values = table.values.clone()
        self.bad = self.live & ((self.values < 0) | (self.values >= self.pages))
        listed = table.bad
        inside = (listed[:, 0] >= self.row0) & (listed[:, 0] < self.row0 + self.rows)
        inside &= (listed[:, 1] >= self.column0) & (listed[:, 1] < self.column0 + self.columns)
        r, c = listed[inside, 0] - self.row0, listed[inside, 1] - self.column0
        self.bad[r, c] = True
        self.values[r, c] = listed[inside, 2]
        self.bad_elsewhere = listed[~inside]  # the bad cells that were not saved, [n, 3]
        self.focus = self._focus(row - self.row0, column - self.column0)
        self.read = self.live | self.bad

    def _focus(self, row: int, column: int) -> tuple[int, int]:
        """The finding's cell, or else a bad one of the same row, or else the first bad one.

        If no cell is bad, the finding's cell is marked as bad.
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

    def bad_rows(self, start: int, stop: int) -> int:
        """How many of the rows start..stop-1 of the saved part have a bad cell."""
        return int(self.bad[start:stop].any(dim=1).sum()) if stop > start else 0

    def used_columns(self, rows: range) -> int:
        """One more than the last column of the saved part in which these rows show anything."""
        if not len(rows) or not self.columns:
            return 0
        part = slice(rows.start, rows.stop)
        busy = (~self.past[part] | self.bad[part]).any(dim=0).nonzero()
        return int(busy[-1, 0]) + 1 if len(busy) else 0


@dataclass(frozen=True)
class BadCell:
    """A bad cell with its row and column in the whole table. ``shown``: the dump has the cell."""

    row: int
    column: int
    value: int
    shown: bool


@dataclass(frozen=True)
class MapRow:
    """One row. cells: the kind (a key of MEANINGS) and the page number of each shown column."""

    number: int  # in the whole table
    rid: str  # '' if not known
    tokens: str
    bad: int  # how many of its cells are bad, those that are not shown included
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Aside:
    """Rows that are not shown, and how many of them have bad cells."""

    rows: int = 0
    bad: int = 0


@dataclass(frozen=True)
class TableView:
    """A page table in words, and the rows and columns around the cell of the finding.

    rows: empty if the table has no cells. before, after: how many columns are left out of the rows
    on either side. Rows and columns are counted in the whole table.
    """

    title: tuple[str, ...]  # the shape, the window, and which part of the table was saved
    pool: str
    pages: int
    pool_range: str
    extremes: tuple[int, int] | None  # of the page numbers in live and bad cells
    reach: str  # how far the page numbers go
    inside: bool  # all of them are pages of the pool
    rows: tuple[MapRow, ...]
    above: Aside
    below: Aside
    column0: int  # of the first cell of each row
    bad_columns: tuple[bool, ...]  # whether any row has a bad cell there
    before: int
    after: int
    focus: tuple[int, int]
    bad_head: str
    bad: tuple[BadCell, ...]  # the first ones
    more_bad: int
    elsewhere: tuple[str, ...]  # the other pools in which the bad page numbers would be valid


def table_view(
    table: Table,
    row: int = -1,
    column: int = -1,
    pools: Sequence[Pool] = (),
    rows: int | None = ROWS,
    number: Callable[[int], str] = rounded,
) -> TableView:
    """Decide what is shown of a table.

    row, column: the finding's cell in the whole table; -1: not known. pools: those of the process,
    to say in which of them an out-of-range page number would have been in range. rows: how many
    rows to show (None: all). number: how a page number is written.
    """
    cells = Cells(table, row, column)
    at = cells.focus
    count = cells.rows if rows is None else max(1, rows)
    shown = window(cells.rows if cells.columns else 0, at[0], count)
    used = min(cells.columns, max(cells.used_columns(shown), at[1] + 1) + 1)
    near = window(used, at[1], MAX_COLUMNS)  # used: a dot shows where the longest row ends
    extremes = _extremes(cells)
    reach, inside = _reach(cells, extremes, number)
    bad = _listed(cells)
    total = int(cells.bad.sum()) + len(cells.bad_elsewhere)
    head = f"{total} bad cell{'s' * (total != 1)}: " if total else "no bad cell in this table"
    names = f"{unit(table)}s"
    return TableView(
        title=_title(cells),
        pool=table.pool.name,
        pages=cells.pages,
        pool_range=f"{names} 0..{cells.pages - 1}" if cells.pages else f"no {names}",
        extremes=extremes,
        reach=reach,
        inside=inside,
        rows=tuple(_row(cells, r, near, number) for r in shown),
        above=Aside(shown.start, cells.bad_rows(0, shown.start)),
        below=Aside(cells.rows - shown.stop, cells.bad_rows(shown.stop, cells.rows)),
        column0=cells.column0 + near.start,
        bad_columns=tuple(cells.bad[:, near.start : near.stop].any(dim=0).tolist()),
        before=near.start,
        after=used - near.stop,
        focus=(cells.row0 + at[0], cells.column0 + at[1]),
        bad_head=head,
        bad=bad,
        more_bad=total - len(bad),
        elsewhere=_elsewhere(cells, [cell.value for cell in bad], pools),
    )


def _title(cells: Cells) -> tuple[str, ...]:
    table, size = cells.table, cells.table.pool.page_size
    rows = "row" if cells.rows_total == 1 else "rows"
    names = f"{unit(table)}s" + (f" of {size}" if size > 1 else "")
    parts = [f"{cells.rows_total} {rows} x {cells.columns_total} {names}"]
    parts.append(f"window {table.window} tokens" if table.window >= 0 else "no window")
    if table.q_len != 1:
        parts.append(f"{table.q_len} query tokens per row")
    if (cells.rows, cells.columns) != (cells.rows_total, cells.columns_total):
        last_row, last_column = cells.row0 + cells.rows - 1, cells.column0 + cells.columns - 1
        saved = f"rows {cells.row0}..{last_row}, columns {cells.column0}..{last_column}"
        parts.append(f"saved: {saved}")
    return tuple(parts)


def _extremes(cells: Cells) -> tuple[int, int] | None:
    flat = torch.cat([cells.values[cells.read], cells.bad_elsewhere[:, 2]])
    return (int(flat.min()), int(flat.max())) if len(flat) else None


def _reach(
    cells: Cells, extremes: tuple[int, int] | None, number: Callable[[int], str]
) -> tuple[str, bool]:
    if extremes is None:
        return "(the kernel reads no cell)", True
    low, high = extremes
    if low < 0:
        return f"table goes from {number(low)} to {number(high)}", False
    inside = high < cells.pages
    return f"table goes up to {number(high)}" + ": inside" * inside, inside


def _row(cells: Cells, r: int, columns: range, number: Callable[[int], str]) -> MapRow:
    part = slice(columns.start, columns.stop)
    of_row = (x[r, part].tolist() for x in (cells.bad, cells.past, cells.outside, cells.values))
    return MapRow(
        number=cells.row0 + r,
        rid=_rid(cells, r),
        tokens=number(int(cells.table.seq_lens[r])),
        bad=int(cells.bad[r].sum()),
        cells=tuple(
            (_kind(bad, past, outside, value), number(value))
            for bad, past, outside, value in zip(*of_row, strict=True)
        ),
    )


def _kind(bad: bool, past: bool, outside: bool, value: int) -> str:
    if bad:
        return "bad"
    if past:
        return "past"
    if outside:
        return "outside"
    return "zero" if value == 0 else "good"


def _rid(cells: Cells, r: int) -> str:
    """The request of a row of the saved part; '' if not known.

    A row without a request is padding if all that it reads is the reserved page 0.
    """
    if not cells.table.rids:
        return ""
    read = cells.values[r][cells.live[r]]
    pads = not cells.bad[r].any() and not read.any()
    return cells.table.rids[r] or ("(pad)" if pads else "")


def _listed(cells: Cells) -> tuple[BadCell, ...]:
    """The first bad cells. Those that were saved come first."""
    saved = [
        BadCell(r + cells.row0, c + cells.column0, int(cells.values[r, c]), True)
        for r, c in cells.bad.nonzero()[:MAX_LISTED].tolist()
    ]
    rest = cells.bad_elsewhere[: MAX_LISTED - len(saved)].tolist()
    return (*saved, *(BadCell(r, c, v, False) for r, c, v in rest))


def _elsewhere(cells: Cells, values: Sequence[int], pools: Sequence[Pool]) -> tuple[str, ...]:
    """The pools may have been mixed up."""
    lines = []
    for pool in pools if any(v < 0 or v >= cells.pages for v in values) else ():
        if pool.name != cells.table.pool.name and all(0 <= v < pool.pages <= BIG for v in values):
            which = str(values[0]) if len(set(values)) == 1 else "all of these"
            lines.append(f"{which} would be inside the {pool.name} pool: 0..{pool.pages - 1}")
    return tuple(lines)
