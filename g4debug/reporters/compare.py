"""The differences between two dumps, for instance of a good server and a bad one.

When, where and by which process a dump was made does not count. If the two have no request id in
common, they are of two servers: ids are then left out, and rows are compared in their order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g4debug.findings.record import Holding, PageEvent, Step, Table, Transition, TrapRecord
from g4debug.findings.runs import runs
from g4debug.reporters._evidence import Cells, length_range, pages

NOT_COMPARED = ("location", "history", "pid")  # location and history are parts of their own


@dataclass(frozen=True)
class Change:
    """One difference: what A has and what B has. None means that this dump has no such thing."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Part:
    """One part of the dumps.

    same: how many of its values are equal. note: one line, or ''. newest_last: the changes are a
    history, so the last ones matter most.
    """

    name: str
    changes: tuple[Change, ...]
    same: int
    note: str = ""
    newest_last: bool = False


def compare(a: TrapRecord, b: TrapRecord) -> list[Part]:
    """All parts in the report's order, equal ones included. What both lack is left out."""
    by_rid = bool(requests(a) & requests(b)) or not (requests(a) and requests(b))
    parts = [
        _mappings("finding", _fields(a.finding), _fields(b.finding)),
        _mappings("where", _where(a, by_rid), _where(b, by_rid)),
        _table(a, b, by_rid),
        _several("holders", a.holdings, b.holdings, lambda h: _holding(h, by_rid)),
        _several("history", _words(a), _words(b), str),
        _several("timeline", a.events, b.events, lambda e: _event(e, by_rid), True),
        _several("spec info", a.transitions, b.transitions, _transition, True),
        _steps(a, b, by_rid),
        _several("allocator", a.allocator, b.allocator, lambda e: _event(e, by_rid), True),
        _mappings("versions", a.versions, b.versions),
        _mappings("pools", _pools(a), _pools(b)),
        _mappings("geometry", a.geometry, b.geometry),
        _mappings("fixes", a.fixes, b.fixes),
        _mappings("tracers", _states(a), _states(b)),
        _mappings("plugins", a.plugins, b.plugins),
        _mappings("others' hooks", _others(a), _others(b)),
        _several("faults", a.faults, b.faults, str, True),
        _mappings("settings", a.environment, b.environment),
    ]
    return [p for p in parts if p.changes or p.same]


def _mappings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Part:
    """The keys with different values, and the keys that only one of the two has."""
    changes = []
    for key in dict.fromkeys((*a, *b)):
        left = str(a[key]) if key in a else None
        right = str(b[key]) if key in b else None
        if left != right:
            changes.append(Change(key, left, right))
    return Part(name, tuple(changes), len(a.keys() | b.keys()) - len(changes))


def _several(
    name: str,
    a: Sequence[Any],
    b: Sequence[Any],
    text: Callable[[Any], str],
    newest_last: bool = False,
) -> Part:
    """The items that only one of the two lists has, in their order. Equal ones are counted."""
    left, right = Counter(map(text, a)), Counter(map(text, b))
    only_a = [Change("only in A", t, None) for t in (left - right).elements()]
    only_b = [Change("only in B", None, t) for t in (right - left).elements()]
    same = sum((left & right).values())
    return Part(name, (*only_a, *only_b), same, newest_last=newest_last)


def requests(record: TrapRecord) -> set[str]:
    """All request ids of a dump."""
    found = {rid for step in record.steps for rid in step.rids}
    found.update(record.table.rids if record.table else ())
    found.update(e.request for e in (*record.events, *record.allocator))
    found.update(h.owner for h in record.holdings)
    return (found | {record.finding.location.request}) - {""}


def _fields(item: Any) -> dict[str, Any]:
    """The fields of a dataclass that are known, that is, neither '' nor -1."""
    values = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {k: v for k, v in values.items() if k not in NOT_COMPARED and v not in ("", -1)}


def _words(record: TrapRecord) -> tuple[str, ...]:
    """The history in words (such as a crash's stack), unless there is a timeline of events."""
    return () if record.events else record.finding.history


def _where(record: TrapRecord, by_rid: bool) -> dict[str, Any]:
    values = _fields(record.finding.location)
    if not by_rid:
        values.pop("request", None)
    return values


def _states(record: TrapRecord) -> dict[str, str]:
    """The status of each tracer. Its counts are left out: they say nothing about a change."""
    return {t.name: t.state for t in record.tracers}


def _others(record: TrapRecord) -> dict[str, str]:
    """The functions of others at our hook sites, and on which side of ours they are."""
    return {f"{o.site}, {o.who}, {o.function}": o.side for o in record.others}


def _pools(record: TrapRecord) -> dict[str, str]:
    return {
        f"{p.name} pool {what}": value
        for p in record.pools
        for what, value in (
            ("size", f"{p.pages} pages of {p.page_size}"),
            ("used tokens", "not known" if p.used_tokens < 0 else str(p.used_tokens)),
        )
    }


def _event(e: PageEvent, by_rid: bool) -> str:
    who = f" for {e.request}" if e.request and by_rid else ""
    words = f"step {e.step}: {e.kind} {e.pool} {pages(e.pages, e.count)}{who}"
    return ", ".join(part for part in (words, e.caller, e.note) if part)


def _transition(t: Transition) -> str:
    words = f"step {t.step}: {t.site}: {t.before} -> {t.after}"
    batch = f"batch {t.requests}" if t.requests >= 0 else ""
    wrong = "" if t.ok else "WRONG"
    return ", ".join(part for part in (words, batch, t.note, wrong) if part)


def _holding(h: Holding, by_rid: bool) -> str:
    who = f" by {h.owner}" if h.owner and by_rid else ""
    words = f"{h.pool} {pages(h.pages, h.count)} ({h.count}) {h.state}{who}"
    return ", ".join(part for part in (words, h.last, h.due) if part)


def _steps(a: TrapRecord, b: TrapRecord, by_rid: bool) -> Part:
    """Steps are matched by number: first the steps that differ, then the steps of only one dump."""
    left, right = {s.step: s for s in a.steps}, {s.step: s for s in b.steps}
    changes, same = [], 0
    for number in sorted(left.keys() & right.keys()):
        x, y = _step(left[number], by_rid), _step(right[number], by_rid)
        keys = [k for k in dict.fromkeys((*x, *y)) if x.get(k) != y.get(k)]
        if keys:
            before, after = (", ".join(f"{k} {v.get(k, 'none')}" for k in keys) for v in (x, y))
            changes.append(Change(f"step {number}", before, after))
        same += not keys
    both = left.keys() & right.keys()
    if not left or not right:
        note = ""
    elif not both:
        note = "no step in common"
    elif changes:
        note = f"first difference at {changes[0].name}"
    else:
        note = f"equal in all {len(both)} steps that both have"
    for here, there in ((left, right), (right, left)):
        for first, last in runs(sorted(here.keys() - there.keys())):
            name = f"step {first}" if first == last else f"steps {first}..{last}"
            told = _summary([here[n] for n in range(first, last + 1)])
            changes.append(Change(name, *((told, None) if here is left else (None, told))))
    return Part("steps", tuple(changes), same, note)


def _step(step: Step, by_rid: bool) -> dict[str, str]:
    """The facts that have to be equal in two runs of a step. The time of the run does not count."""
    lengths = dict(zip(step.rids, step.seq_lens, strict=False)) if by_rid else {}
    values = {
        "mode": step.forward_mode,
        "batch": str(len(step.seq_lens) or len(step.rids)),
        "spec_info": step.spec_info,
        "full used": str(step.full_used) if step.full_used >= 0 else "",
        "swa used": str(step.swa_used) if step.swa_used >= 0 else "",
        "queue": str(step.waiting) if step.waiting >= 0 else "",
    }
    if lengths:
        values |= {f"tokens of {rid}": str(n) for rid, n in lengths.items()}
    else:
        values["seq_lens"] = " ".join(map(str, step.seq_lens))
    return {k: v for k, v in values.items() if v}


def _summary(items: Sequence[Step]) -> str:
    modes = Counter(step.forward_mode or "?" for step in items)
    if len(items) > 1:
        return ", ".join(f"{n} {mode}" for mode, n in modes.most_common())
    step = items[0]
    batch = len(step.seq_lens) or len(step.rids)
    return f"{step.forward_mode or '?'}, batch {batch}, seq_lens {length_range(step.seq_lens)}"


def _table(a: TrapRecord, b: TrapRecord, by_rid: bool) -> Part:
    """The lengths of the rows and the cells that a kernel may read.

    Rows are matched by request id, or by their place.
    """
    if a.table is None or b.table is None:
        sizes = [
            {} if t is None else {"table": "x".join(map(str, t.values.shape))}
            for t in (a.table, b.table)
        ]
        return _mappings("page table", sizes[0], sizes[1])
    head = _mappings("page table", _shape(a.table), _shape(b.table))
    changes, same = list(head.changes), head.same
    left, right = _rows(a.table, by_rid), _rows(b.table, by_rid)
    at = (a.finding.location, b.finding.location)
    x, y = (Cells(t, w.row, w.column) for t, w in zip((a.table, b.table), at, strict=True))
    for key in dict.fromkeys((*left, *right)):
        name = f"row {key}" if isinstance(key, int) else f"request {key}"
        if key in left and key in right:
            found, equal = _cells(name, (x, y), (left[key], right[key]))
            changes += found
            same += equal
        elif key in left:
            changes.append(Change(name, f"row {x.row0 + left[key]}", None))
        else:
            changes.append(Change(name, None, f"row {y.row0 + right[key]}"))
    return Part("page table", tuple(changes), same)


def _shape(table: Table) -> dict[str, Any]:
    return {
        "pool": f"{table.pool.name}, {table.pool.pages} pages of {table.pool.page_size}",
        "window": table.window,
        "query tokens per row": table.q_len,
        "size": f"{table.rows_total} x {table.columns_total}",
    }


def _rows(table: Table, by_rid: bool) -> dict[Hashable, int]:
    """The key of each row -> its index. The key is the request id, or else the row's place."""
    keys: dict[Hashable, int] = {}
    for i in range(table.values.shape[0]):
        rid = table.rids[i] if table.rids and by_rid else ""
        keys[rid if rid and rid not in keys else i + table.row0] = i
    return keys


def _cells(
    name: str, tables: tuple[Cells, Cells], rows: tuple[int, int]
) -> tuple[list[Change], int]:
    """The differences in one row, and the number of equal cells; only columns that both saved."""
    pairs = list(zip(tables, rows, strict=True))
    changes = []
    for what, numbers in (
        ("row", [t.row0 + r for t, r in pairs]),
        ("tokens", [int(t.table.seq_lens[r]) for t, r in pairs]),
    ):
        if numbers[0] != numbers[1]:
            changes.append(Change(f"{name} {what}", *map(str, numbers)))
    start = max(t.column0 for t in tables)
    stop = max(start, min(t.column0 + t.columns for t in tables))
    parts = [slice(start - t.column0, stop - t.column0) for t in tables]
    values = [t.values[r, part] for (t, r), part in zip(pairs, parts, strict=True)]
    read = [t.read[r, part] for (t, r), part in zip(pairs, parts, strict=True)]
    differ = (read[0] != read[1]) | (read[0] & read[1] & (values[0] != values[1]))
    for c in np.flatnonzero(differ).tolist():
        texts = [str(int(v[c])) if bool(r[c]) else None for v, r in zip(values, read, strict=True)]
        changes.append(Change(f"{name} column {start + c}", texts[0], texts[1]))
    return changes, int((read[0] & read[1] & ~differ).sum())
