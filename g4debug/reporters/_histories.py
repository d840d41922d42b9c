"""The histories of a dump as tables: steps, page events, hand-overs of spec_info, held pages.

What a row says is decided here once, for the terminal and for HTML. The record is not trusted,
because its numbers may come from a damaged file. An empty cell means "not known".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
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
from g4debug.reporters.text import counted

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
    """Milliseconds from the beginning of a step to that of the next one; '' if not known."""
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
    """Who holds the pages, worst first, and what should have freed them."""
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
    """What CUDA printed about assertions that failed in kernels, the first one first."""
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
    """The lookups whose index may have been out of range. One that does not fit is marked."""
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


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


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


def _known(number: int, text: Callable[[int], str] = str) -> str:
    return text(number) if number >= 0 else ""
