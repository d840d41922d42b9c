"""The evidence of a dump in a report: the page table around the bad cell, and the histories.

That is decided here once, for the terminal and for HTML. The record is not trusted: its numbers
may come from a damaged file, so each is clamped before it is put into an int64. Only the visible
part of a table is turned into Python numbers. The rest stays in numpy, so that 256 rows of 2048
columns take milliseconds. In a history an empty cell means "not known".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import (
    DeviceAssert,
    Holding,
    Lookup,
    PageEvent,
    Pool,
    Step,
    Table,
    Transition,
    TrapRecord,
)
from g4debug.findings.runs import runs
from g4debug.reporters.text import counted

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
    """The word for a cell's content: a page, or in the lists of the triton backend a token."""
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
        seq = table.seq_lens.clip(0, BIG)
        # The number of columns that hold KV: ceil(seq_len / page_size), without overflow.
        ends = np.where(seq > 0, (seq - 1) // page_size + 1, seq)
        absolute = np.arange(self.columns) + self.column0
        self.past = absolute[None, :] >= ends[:, None]
        early = absolute[None, :] < table.first_live[:, None]
        self.outside = early & ~self.past
        self.live = ~self.past & ~early
        self.values = table.values.copy()
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
            return row, int(np.flatnonzero(self.bad[row])[0])
        first = np.flatnonzero(self.bad)[:1]
        if len(first):
            return divmod(int(first[0]), int(self.columns))
        row = clamp(row, 0, max(0, self.rows - 1))
        return row, clamp(column, 0, max(0, self.columns - 1))

    def bad_rows(self, start: int, stop: int) -> int:
        """How many of the rows start..stop-1 of the saved part have a bad cell."""
        return int(self.bad[start:stop].any(axis=1).sum()) if stop > start else 0

    def used_columns(self, rows: range) -> int:
        """One more than the last column of the saved part in which these rows show anything."""
        if not len(rows) or not self.columns:
            return 0
        part = slice(rows.start, rows.stop)
        busy = np.flatnonzero((~self.past[part] | self.bad[part]).any(axis=0))
        return int(busy[-1]) + 1 if len(busy) else 0


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
    """Decide which part of a table is shown, and how.

    row, column: the finding's cell in the whole table; -1: not known. pools: the pools of the
    process, to name one in which an out-of-range page number would be in range. rows: how many rows
    to show (None: all). number: how a page number is written.
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
        bad_columns=tuple(map(bool, np.any(cells.bad[:, near.start : near.stop], axis=0))),
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
    flat = np.concatenate([cells.values[cells.read], cells.bad_elsewhere[:, 2]])
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
        for r, c in np.argwhere(cells.bad)[:MAX_LISTED].tolist()
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


# How many rows of each history are shown unless --all is given.
STEPS = 8
EVENTS = 12
TRANSITIONS = 12
HOLDINGS = 8
ALLOCATOR = 16
ASSERTS = 4
LOOKUPS = 16

STOPPED = "stopped by g4debug: the allocator did not get the page back"

VERDICTS = {"could": "could have been", "cannot": "cannot have been"}

T = TypeVar("T")
Columns = list[tuple["Column", Callable[[T], str]]]  # each with the words of its cells


@dataclass(frozen=True)
class Column:
    """``gives``: the column's turn to be cut where room is short. 1 is cut first, 0 never.

    A column is cut down to ``least`` characters.
    """

    name: str
    right: bool = False  # a number
    gives: int = 0
    least: int = 8
    tail: bool = False  # cut it at the beginning, because the end of its text says more


@dataclass(frozen=True)
class Row:
    """cells: one for each column. below: (label, text), each on a line of its own under the row."""

    cells: tuple[str, ...]
    mark: bool = False  # this is the row that the finding is about
    below: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Grid:
    """A history, newest last, or the worst of something first.

    front: the rows that are always shown. rest: rows that a page can unfold, which stand above them
    in a history and below them otherwise. hidden: how many rows are not in front, in words; ''
    if all are. left_out: how many are not in the rest either.
    """

    columns: tuple[Column, ...]
    front: tuple[Row, ...]
    rest: tuple[Row, ...]
    hidden: str
    left_out: str
    newest_last: bool


def steps(record: TrapRecord, most: int | None) -> Grid:
    """The last worker steps. The step of the finding is marked.

    Lengths are the smallest and the largest of the batch, in tokens. The use of a pool is given in
    tokens, and as a share of the pool if its size is known. ms is the time from the beginning of a
    step to the beginning of the next one.
    """
    at = record.finding.location.step
    return step_grid(record.steps, record.pools, at, most)


def step_grid(
    items: Sequence[Step], pools: Sequence[Pool], at: int = -1, most: int | None = None
) -> Grid:
    sizes = {p.name: p.tokens for p in pools}
    lasted = {id(x): ms for x, y in itertools.pairwise(items) if (ms := _lasted(x, y))}
    columns: Columns[Step] = [
        (Column("step", right=True), lambda x: str(x.step)),
        (Column("mode", gives=2), lambda x: x.forward_mode),
        (Column("batch", right=True), lambda x: str(len(x.seq_lens) or len(x.rids))),
        (Column("seq_lens", right=True), lambda x: length_range(x.seq_lens)),
        (Column("spec_info", gives=1, tail=True), lambda x: x.spec_info),
        (Column("full used", right=True), lambda x: _use(x.full_used, sizes.get("full", 0))),
        (Column("swa used", right=True), lambda x: _use(x.swa_used, sizes.get("swa", 0))),
    ]
    if any(step.waiting > 0 for step in items):
        columns.append((Column("queue", right=True), lambda x: _known(x.waiting, short)))
    if lasted:
        columns.append((Column("ms", right=True), lambda x: lasted.get(id(x), "")))
    return _grid("step", columns, items, STEPS, most, mark=lambda x: x.step == at >= 0)


def _lasted(step: Step, following: Step) -> str:
    """Milliseconds from the beginning of a step to the beginning of the next; '' if not known."""
    if min(step.time_ns, following.time_ns) <= 0:
        return ""
    tenths = (following.time_ns - step.time_ns) // 100_000  # no float: the numbers may be absurd
    return f"{tenths // 10}.{tenths % 10}" if 0 <= tenths < 1000 else short(tenths // 10)


def events(record: TrapRecord, most: int | None) -> Grid:
    """The events of the page that the finding is about. The event that is to blame is marked."""
    bad = offending(record.events, record.finding.kind)
    if bad is None and record.events and not record.holdings:  # a leak has none
        bad = record.events[-1]
    return event_grid(record.events, EVENTS, most, bad)


def allocator(record: TrapRecord, most: int | None) -> Grid:
    """The last events of all pages. Without --all they are shown only if there is nothing else."""
    alone = not (record.table or record.events or record.transitions or record.holdings)
    return event_grid(record.allocator, ALLOCATOR if alone else 0, most)


def event_grid(
    items: Sequence[PageEvent], shown: int, most: int | None = None, bad: PageEvent | None = None
) -> Grid:
    columns: Columns[PageEvent] = [
        (Column("step", right=True), lambda e: _known(e.step)),
        (Column("event", gives=4, least=13), lambda e: e.kind + ", stopped" * e.stopped),
        (Column("pool", gives=5), lambda e: e.pool),
        (Column("pages", gives=3), lambda e: pages(e.pages, e.count)),
        (Column("request", gives=1, least=9), lambda e: e.request),
        (Column("caller", gives=2, least=12), lambda e: e.caller),
    ]
    return _grid(
        "event",
        columns,
        items,
        shown,
        most,
        mark=lambda e: e is bad,
        below=lambda e: [("", STOPPED * e.stopped), ("", e.note)],
    )


def offending(items: Sequence[PageEvent], kind: str) -> PageEvent | None:
    """The newest event that the finding's kind names: for use-after-free, a free."""
    same = {
        "extend": "alloc",
        "decode": "alloc",
        "returned": "alloc",
        "unmap": "map",
        "miswritten": "mismatch",
    }
    for event in reversed(items):
        if event.kind and same.get(event.kind, event.kind) in kind:
            return event
    return None


def transitions(record: TrapRecord, most: int | None) -> Grid:
    """The hand-overs of ``batch.spec_info``. A wrong one is marked."""
    columns: Columns[Transition] = [
        (Column("step", right=True), lambda t: _known(t.step)),
        (Column("hand-over", gives=3), lambda t: t.site),
        (Column("before", gives=2), lambda t: t.before),
        (Column("after", gives=1), lambda t: t.after),
        (Column("batch", right=True), lambda t: _known(t.requests)),
    ]
    return _grid(
        "hand-over",
        columns,
        record.transitions,
        TRANSITIONS,
        most,
        mark=lambda t: not t.ok,
        below=lambda t: [("", t.note)],
    )


def holdings(record: TrapRecord, most: int | None) -> Grid:
    """The holders of the pages, worst first, and the release that should have freed them."""
    columns: Columns[Holding] = [
        (Column("pool", gives=4), lambda h: h.pool),
        (Column("pages", gives=2), lambda h: pages(h.pages, h.count)),
        (Column("count", right=True), lambda h: str(h.count)),
        (Column("state", gives=3), lambda h: h.state),
        (Column("owner", gives=1, least=9), lambda h: h.owner),
        (Column("step", right=True), lambda h: _known(h.step)),
    ]
    return _grid(
        "entry",
        columns,
        record.holdings,
        HOLDINGS,
        most,
        mark=lambda h: h.state in KINDS["pool-leak"],
        below=lambda h: [("last", h.last), ("due", h.due)],
        newest_last=False,
    )


def asserts(record: TrapRecord, most: int | None) -> Grid:
    """The assertions that failed in kernels, as CUDA printed them, the first one first."""
    columns: Columns[DeviceAssert] = [
        (Column("threads", right=True), lambda a: short(a.count)),
        (Column("file", gives=2, tail=True), lambda a: f"{a.file}:{short(a.line)}"),
        (Column("kernel", gives=1), lambda a: a.function),
        (Column("first block", gives=4), lambda a: a.block),
        (Column("thread", gives=3), lambda a: a.thread),
    ]
    return _grid(
        "assertion",
        columns,
        record.asserts,
        ASSERTS,
        most,
        below=lambda a: [("assertion", a.expression)],
        newest_last=False,
    )


def lookups(record: TrapRecord, most: int | None) -> Grid:
    """The lookups that may have had an index out of range. One that could is marked."""
    columns: Columns[Lookup] = [
        (Column("verdict"), lambda x: VERDICTS.get(x.verdict, x.verdict)),
        (Column("lookup", gives=2, least=16), lambda x: x.name),
        (Column("indices", gives=1), lambda x: x.indices),
        (
            Column("range", right=True),
            lambda x: f"{short(x.low)}..{short(x.high)}" if x.high >= x.low else "",
        ),
        (Column("rows", right=True), lambda x: _known(x.rows, short)),
    ]
    return _grid(
        "lookup",
        columns,
        record.lookups,
        LOOKUPS,
        most,
        mark=lambda x: x.verdict == "could",
        below=lambda x: [("", f"{x.place}: {x.why}")],
        newest_last=False,
    )


def _grid(
    one: str,
    columns: Columns[T],
    items: Sequence[T],
    shown: int,
    most: int | None,
    *,
    mark: Callable[[T], bool] = lambda item: False,
    below: Callable[[T], Sequence[tuple[str, str]]] = lambda item: (),
    newest_last: bool = True,
) -> Grid:
    """A grid of ``most`` rows, or of ``shown`` rows if that is more. most: None shows all of them.

    one: what a row is: "step".
    """
    shown = len(items) if most is None else min(len(items), shown)
    keep = min(len(items), max(shown, most or 0))
    rows = tuple(
        Row(
            tuple(text(item) for _, text in columns),
            mark(item),
            tuple((label, text) for label, text in below(item) if text),
        )
        for item in (items[len(items) - keep :] if newest_last else items[:keep])
    )
    front, rest = rows[:shown], rows[shown:]
    if newest_last:
        rest, front = rows[: keep - shown], rows[keep - shown :]

    which = "earlier" if newest_last else "more"
    hidden, left_out = (
        counted(n, f"{which} {one}") if n else "" for n in (len(items) - shown, len(items) - keep)
    )
    if not shown:
        hidden = hidden.replace(f" {which}", "")  # there is no row that they are earlier than
    return Grid(tuple(c for c, _ in columns), front, rest, hidden, left_out, newest_last)


def pages(numbers: Sequence[int], count: int, limit: int = 6) -> str:
    """``12..14, 20 +5``: pages that follow each other are joined; +5 counts those left out."""
    shown = runs(numbers[:64])[:limit]
    text = ", ".join(map(length_range, shown))
    told = sum(last - first + 1 for first, last in shown)
    return f"{text} +{short(count - told)}".strip() if count > told else text


def length_range(lengths: Sequence[int]) -> str:
    if not lengths:
        return ""
    low, high = min(lengths), max(lengths)
    return short(low) if low == high else f"{short(low)}..{short(high)}"


def percent(used: int, size: int) -> str:
    """The used share, rounded. Only an empty pool has 0 %, and only a full pool 100 %.

    In whole numbers throughout, because the numbers of a damaged file may be too large for a float.
    """
    if used * 200 < size and used > 0:
        return "<1%"
    if used * 200 >= size * 199 and used < size:
        return ">99%"
    return f"{min(999, (used * 200 + size) // (2 * size))}%"


def _use(used: int, size: int) -> str:
    if used < 0:
        return ""
    return f"{short(used)} {percent(used, size):>4}" if size > 0 else short(used)


def short(number: int) -> str:
    """The number; one that is longer than any real one is abbreviated."""
    text = str(number)
    return text if len(text) <= 11 else f"{text[:2]}e{len(text) - 2}"


def _known(number: int, text: Callable[[int], str] = str) -> str:
    return text(number) if number >= 0 else ""
