"""The histories of a dump as tables: steps, page events, hand-overs of spec_info, held pages.

What a row says is decided here once, for the terminal and for HTML. The record is not trusted,
because its numbers may come from a damaged file. An empty cell means "not known".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from g4debug.findings.kinds import KINDS
from g4debug.findings.record import (
    DeviceAssert,
    Holding,
    Lookup,
    PageEvent,
    Pool,
    Step,
    Transition,
    TrapRecord,
)

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
    """The last rows of a history (with ``newest_last``), or the first ones.

    shown: how many rows to show unless --all is given. left_out: how many rows the history has
    beyond ``rows``.
    """

    one: str  # what a row is: "step"
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    shown: int
    left_out: int = 0
    newest_last: bool = True

    @property
    def hidden(self) -> str:
        """How many rows are not shown, in words; '' if all are shown."""
        return self.count(self.left_out + max(0, len(self.rows) - self.shown))

    def count(self, n: int) -> str:
        if n <= 0:
            return ""
        what = f"{self.one}{'s' * (n != 1)}"
        return f"{n} earlier {what}" if self.newest_last else f"{n} more {what}"

    @property
    def front(self) -> tuple[Row, ...]:
        """The rows that are always shown."""
        n = max(0, len(self.rows) - self.shown)
        return self.rows[n:] if self.newest_last else self.rows[: self.shown]

    @property
    def rest(self) -> tuple[Row, ...]:
        """The other rows."""
        n = max(0, len(self.rows) - self.shown)
        return self.rows[:n] if self.newest_last else self.rows[self.shown :]


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
    lasted = {i: ms for i in range(len(items)) if (ms := _lasted(items, i)) is not None}
    queued = any(step.waiting > 0 for step in items)

    def row(i: int) -> Row:
        step = items[i]
        cells = (
            str(step.step),
            step.forward_mode,
            str(len(step.seq_lens) or len(step.rids)),
            length_range(step.seq_lens),
            step.spec_info,
            _use(step.full_used, sizes.get("full", 0)),
            _use(step.swa_used, sizes.get("swa", 0)),
            *([short(step.waiting) if step.waiting >= 0 else ""] if queued else []),
            *([lasted.get(i, "")] if lasted else []),
        )
        return Row(cells, mark=step.step == at >= 0)

    columns = (
        Column("step", right=True),
        Column("mode", gives=2),
        Column("batch", right=True),
        Column("seq_lens", right=True),
        Column("spec_info", gives=1, tail=True),
        Column("full used", right=True),
        Column("swa used", right=True),
        *([Column("queue", right=True)] if queued else []),
        *([Column("ms", right=True)] if lasted else []),
    )
    return _grid("step", columns, range(len(items)), row, STEPS, most)


def _lasted(items: Sequence[Step], i: int) -> str | None:
    """Milliseconds from the beginning of a step to that of the next one; None if not known."""
    if i + 1 >= len(items) or min(items[i].time_ns, items[i + 1].time_ns) <= 0:
        return None
    tenths = (
        items[i + 1].time_ns - items[i].time_ns
    ) // 100_000  # not a float: the numbers may be absurd
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
    def row(event: PageEvent) -> Row:
        cells = (
            str(event.step) if event.step >= 0 else "",
            f"{event.kind}, stopped" if event.stopped else event.kind,
            event.pool,
            pages(event.pages, event.count),
            event.request,
            event.caller,
        )
        stopped = STOPPED if event.stopped else ""
        return Row(cells, mark=event is bad, below=_notes(("", stopped), ("", event.note)))

    columns = (
        Column("step", right=True),
        Column("event", gives=4, least=13),
        Column("pool", gives=5),
        Column("pages", gives=3),
        Column("request", gives=1, least=9),
        Column("caller", gives=2, least=12),
    )
    return _grid("event", columns, items, row, shown, most)


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

    def row(t: Transition) -> Row:
        cells = (
            str(t.step) if t.step >= 0 else "",
            t.site,
            t.before,
            t.after,
            str(t.requests) if t.requests >= 0 else "",
        )
        return Row(cells, mark=not t.ok, below=_notes(("", t.note)))

    columns = (
        Column("step", right=True),
        Column("hand-over", gives=3),
        Column("before", gives=2),
        Column("after", gives=1),
        Column("batch", right=True),
    )
    return _grid("hand-over", columns, record.transitions, row, TRANSITIONS, most)


def holdings(record: TrapRecord, most: int | None) -> Grid:
    """Who holds the pages, worst first, and what should have freed them."""

    def row(h: Holding) -> Row:
        cells = (
            h.pool,
            pages(h.pages, h.count),
            str(h.count),
            h.state,
            h.owner,
            str(h.step) if h.step >= 0 else "",
        )
        below = _notes(("last", h.last), ("due", h.due))
        return Row(cells, mark=h.state in KINDS["pool-leak"], below=below)

    columns = (
        Column("pool", gives=4),
        Column("pages", gives=2),
        Column("count", right=True),
        Column("state", gives=3),
        Column("owner", gives=1, least=9),
        Column("step", right=True),
    )
    return _grid("entry", columns, record.holdings, row, HOLDINGS, most, newest_last=False)


def asserts(record: TrapRecord, most: int | None) -> Grid:
    """What CUDA printed about assertions that failed in kernels, the first one first."""

    def row(a: DeviceAssert) -> Row:
        cells = (short(a.count), f"{a.file}:{short(a.line)}", a.function, a.block, a.thread)
        return Row(cells, below=_notes(("assertion", a.expression)))

    columns = (
        Column("threads", right=True),
        Column("file", gives=2, tail=True),
        Column("kernel", gives=1),
        Column("first block", gives=4),
        Column("thread", gives=3),
    )
    return _grid("assertion", columns, record.asserts, row, ASSERTS, most, newest_last=False)


def lookups(record: TrapRecord, most: int | None) -> Grid:
    """The lookups whose index may have been out of range. One that does not fit is marked."""

    def row(x: Lookup) -> Row:
        known = x.high >= x.low
        cells = (
            VERDICTS.get(x.verdict, x.verdict),
            x.name,
            x.indices,
            f"{short(x.low)}..{short(x.high)}" if known else "",
            short(x.rows) if x.rows >= 0 else "",
        )
        return Row(cells, mark=x.verdict == "could", below=_notes(("", f"{x.place}: {x.why}")))

    columns = (
        Column("verdict"),
        Column("lookup", gives=2, least=16),
        Column("indices", gives=1),
        Column("range", right=True),
        Column("rows", right=True),
    )
    return _grid("lookup", columns, record.lookups, row, LOOKUPS, most, newest_last=False)


def _grid(
    one: str,
    columns: tuple[Column, ...],
    items: Sequence[T],
    row: Callable[[T], Row],
    shown: int,
    most: int | None,
    newest_last: bool = True,
) -> Grid:
    """A grid of ``most`` rows (None: all), or of ``shown`` rows if that is more."""
    keep = len(items) if most is None else min(len(items), max(shown, most))
    kept = items[len(items) - keep :] if newest_last else items[:keep]
    rows = tuple(row(item) for item in kept)
    return Grid(one, columns, rows, shown, len(items) - keep, newest_last)


def pages(numbers: Sequence[int], count: int, limit: int = 6) -> str:
    """``12..14, 20 +5``: pages that follow each other are joined; +5 counts those left out."""
    runs: list[list[int]] = []
    for page in numbers[:64]:
        if runs and page == runs[-1][-1] + 1:
            runs[-1][1:] = [page]
        else:
            runs.append([page])
    shown = runs[:limit]
    text = ", ".join("..".join(map(short, run)) for run in shown)
    told = sum(run[-1] - run[0] + 1 for run in shown)
    return f"{text} +{short(count - told)}".strip() if count > told else text


def length_range(lengths: Sequence[int]) -> str:
    if not lengths:
        return ""
    low, high = min(lengths), max(lengths)
    return short(low) if low == high else f"{short(low)}..{short(high)}"


def percent(used: int, size: int) -> str:
    """The used share, rounded; but what is not empty is never 0 %, and what is not full never 100.

    In whole numbers throughout: those of a damaged file may be too large for a float.
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


def _notes(*notes: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((label, text) for label, text in notes if text)
