"""An incident: the dumps that several ranks wrote together, and what differs between them.

The first finding is shown in full, by the same reporters as that of a single dump. This module
makes what is added to it: who was first, the other findings in a line each, and the differences.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from g4debug.dumps.heads import Head, quoted
from g4debug.dumps.plain import to_plain
from g4debug.findings.record import Step, TrapRecord
from g4debug.reporters._facts import Entry, Line, Span
from g4debug.reporters._histories import length_range
from g4debug.reporters.json import jsonable
from g4debug.reporters.text import NOTHING_FOUND, OTHER_RANK, shorten

SHOWN = 40  # lines of one part; --json has all
UNKNOWN = "not known"
# What the ranks of one batch have in common in each step, beside the batch.
IN_STEP = {
    "spec_info": "spec_info",
    "rows": "rows of req_to_token",
    "committed": "committed tokens",
    "allocated": "allocated tokens",
    "evicted": "evicted tokens",
    "full_used": "tokens in use in the full pool",
    "swa_used": "tokens in use in the swa pool",
}


@dataclass(frozen=True)
class Member:
    """One dump. record: None if it was not read; then ``broken`` says why, or it was one too many.

    time: ISO 8601 in UTC, as the host's clock said.
    """

    path: str
    time: str
    head: Head
    record: TrapRecord | None
    broken: str = ""


@dataclass(frozen=True)
class Difference:
    """values: each value, with the labels of the members that have it."""

    name: str
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class View:
    """The members, the first finding first; that one has a record.

    elsewhere: how many other incidents there are in the folders.
    """

    members: tuple[Member, ...]
    elsewhere: int = 0

    @property
    def first(self) -> Member:
        return self.members[0]

    @property
    def record(self) -> TrapRecord:
        assert self.first.record is not None
        return self.first.record


def labels(view: View) -> list[str]:
    """A short name of each member: what tells it from the others, of host and ranks, or its pid."""
    heads = [m.head for m in view.members]
    hosts = len({h.host for h in heads if h.host}) > 1
    ranks = [{"dp": h.dp_rank, "tp": h.rank, "pp": h.pp_rank} for h in heads]
    vary = [n for n in ("dp", "tp", "pp") if len({r[n] for r in ranks}) > 1]
    names: list[str] = []
    for head, rank in zip(heads, ranks, strict=True):
        known = "/".join(f"{n}{rank[n]}" for n in vary or rank if rank[n] >= 0)
        place = [head.host] if hosts and head.host else []
        name = " ".join([*place, known or (f"pid {head.pid}" if head.pid >= 0 else "a file")])
        again = sum(n == name or n.startswith(f"{name} (") for n in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def before(view: View) -> list[Entry]:
    """What stands above the first finding: what this is, and who was first."""
    n = len(view.members)
    processes = len({(m.head.host, m.head.pid) for m in view.members})
    hosts = sorted({m.head.host for m in view.members if m.head.host})
    seconds = max((_after(view, m) for m in view.members), default=0.0)
    where = f" on {_count(len(hosts), 'host')}" if hosts else ""
    text = f"{_count(n, 'dump')} of {_count(processes, 'process', 'es')}{where}"
    lines: list[Line] = [
        ((Span(f"{text}, within {seconds:.1f} s", "strong"),),),
        ((Span(f"first: {_who(view.first, labels(view)[0])}; its finding follows in full"),),),
    ]
    if len(hosts) > 1:
        lines.append(((Span("who was first is as true as the clocks of the hosts", "dim"),),))
    unread = sum(m.record is None and not m.broken for m in view.members)
    if unread:
        text = f"{_count(unread, 'dump')} were not read whole: what differs in them is not told"
        lines.append(((Span(text, "warn"),),))
    if view.elsewhere:
        others = _count(view.elsewhere, "other incident")
        lines.append(((Span(f"{others} here: g4debug list tells them apart", "dim"),),))
    return [Entry("INCIDENT", tuple(lines))]


def after(view: View) -> list[Entry]:
    """The other findings, and what differs between the dumps."""
    entries = []
    rest = list(zip(view.members, labels(view), strict=True))[1:]
    if rest:
        lines = [_line(view, member, label) for member, label in rest[:SHOWN]]
        if len(rest) > SHOWN:
            lines.append(((Span(f"{len(rest) - SHOWN} more (--json)", "dim"),),))
        entries.append(Entry("OTHERS", tuple(lines)))
    found = differences(view)
    told = [_told(d) for d in found[:SHOWN]]
    if len(found) > SHOWN:
        told.append(((Span(f"{len(found) - SHOWN} more differences (--json)", "dim"),),))
    if sum(m.record is not None for m in view.members) > 1:
        entries.append(Entry("DIFFERS", tuple(told) or _nothing()))
    return entries


def differences(view: View) -> list[Difference]:
    """What is not the same in all dumps that could be read. Most telling first."""
    known = [
        (label, member.record)
        for label, member in zip(labels(view), view.members, strict=True)
        if member.record is not None
    ]
    tables = {label: _facts_of(record) for label, record in known}
    found = _in_first_step(known)
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        values: dict[str, tuple[str, ...]] = {}
        for label, table in tables.items():
            value = table.get(name, UNKNOWN)
            values[value] = (*values.get(value, ()), label)
        if len(values) > 1:
            found.append(Difference(name, values))
    return found


def render_json(view: View, stream: IO[str]) -> None:
    """Write one JSON object.

    ``incident``: how many dumps and other incidents there are; ``members``: path, head and whether
    it could be read, of each dump, the first finding first; ``differs``; ``first``: the whole
    record of the first finding.
    """
    data = {
        "kind": "g4debug-incident",
        "incident": {"dumps": len(view.members), "elsewhere": view.elsewhere},
        "members": [
            {
                "label": label,
                "path": m.path,
                "broken": m.broken,
                "read": m.record is not None,
                **dataclasses.asdict(m.head),
            }
            for m, label in zip(view.members, labels(view), strict=True)
        ],
        "differs": [
            {"name": d.name, "values": [{"value": v, "members": w} for v, w in d.values.items()]}
            for d in differences(view)
        ],
        "first": jsonable(to_plain(view.record)),
    }
    json.dump(data, stream, indent=2, allow_nan=False)
    stream.write("\n")


def _facts_of(record: TrapRecord) -> dict[str, str]:
    """What is compared: name -> value."""
    finding, at = record.finding, record.finding.location
    own = finding.kind != OTHER_RANK
    facts: dict[str, Any] = {
        "finding": f"{finding.check}: {finding.kind}" if own else "none of its own",
        "step": at.step if at.step >= 0 else UNKNOWN,
        "forward mode": at.forward_mode or UNKNOWN,
    }
    for title, values in (
        ("version of", record.versions),
        ("fix", record.fixes),
        ("tracer", {t.name: t.state for t in record.tracers}),
        ("setting", record.environment),
        ("argument", {**record.defaults, **record.arguments}),
        ("geometry", record.geometry),
    ):
        facts |= {f"{title} {name}": value for name, value in values.items()}
    facts |= {f"{p.name} pool": f"{p.pages} pages of {p.page_size}" for p in record.pools}
    facts["faults"] = "; ".join(record.faults) or "none"
    return {name: str(value) for name, value in facts.items()}


def _batch(step: Step) -> str:
    mode = step.forward_mode or "?"
    n = len(step.rids) or len(step.seq_lens)
    lengths = f", seq_lens {length_range(step.seq_lens)}" if step.seq_lens else ""
    rids = ", ".join(shorten(rid, 9) for rid in step.rids[:4])
    more = ", …" if len(step.rids) > 4 else ""
    return f"{mode}, {_count(n, 'request')}{lengths}" + (f" ({rids}{more})" if rids else "")


def _in_first_step(known: Sequence[tuple[str, TrapRecord]]) -> list[Difference]:
    """What differs in the first step in which ranks differ that serve the same batch.

    These are the tensor-parallel ranks of one launch with the same dp and pp rank.
    """
    groups: dict[tuple[str, int, int], list[tuple[str, dict[int, Step]]]] = {}
    for label, record in known:
        at = record.finding.location
        steps = {step.step: step for step in record.steps}
        groups.setdefault((record.launch, at.dp_rank, at.pp_rank), []).append((label, steps))
    found = []
    for group in groups.values():
        common = set.intersection(*(set(steps) for _, steps in group))
        for number in sorted(common):
            there = [
                difference
                for name, value in _STEP.items()
                if len((difference := _difference(name, number, value, group)).values) > 1
            ]
            found += there
            if there:
                break
    return found


def _difference(
    name: str,
    number: int,
    value: Callable[[Step], str],
    group: Sequence[tuple[str, Mapping[int, Step]]],
) -> Difference:
    values: dict[str, tuple[str, ...]] = {}
    for label, steps in group:
        text = value(steps[number])
        values[text] = (*values.get(text, ()), label)
    return Difference(f"{name} of step {number}", values)


def _part(field: str) -> Callable[[Step], str]:
    def text(step: Step) -> str:
        value = getattr(step, field)
        return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)

    return text


_STEP: dict[str, Callable[[Step], str]] = {
    "batch": _batch,
    **{words: _part(field) for field, words in IN_STEP.items()},
}


def _line(view: View, member: Member, label: str) -> Line:
    head = member.head
    if member.broken:
        return ((Span(label), Span(f"cannot be read: {member.broken}", "warn")), _file(member))
    what = head.headline.removeprefix("g4debug: ") or f"{head.check}: {head.kind}"
    if head.kind == OTHER_RANK:
        what = NOTHING_FOUND
    step = ((Span(f"step {head.step}"),),) if head.step >= 0 else ()
    return (
        (Span(f"+{_after(view, member):.1f} s", "dim"), Span(label, "strong")),
        *step,
        (Span(shorten(what, 160)),),
        _file(member),
    )


def _file(member: Member) -> tuple[Span, ...]:
    return (Span(quoted(member.path.rpartition("/")[2]), "dim"),)


def _told(difference: Difference) -> Line:
    values = (
        (Span(f"{', '.join(who)}:", "dim"), Span(shorten(value, 120)))
        for value, who in difference.values.items()
    )
    return ((Span(difference.name, "strong"),), *values)


def _who(member: Member, label: str) -> str:
    head = member.head
    host = f"{head.host} " if head.host and not label.startswith(head.host) else ""
    pid = f", pid {head.pid}" if head.pid >= 0 and "pid" not in label else ""
    return f"{host}{label}{pid}"


def _after(view: View, member: Member) -> float:
    """Seconds after the first finding; 0 if not known."""
    try:
        first, this = (datetime.fromisoformat(t) for t in (view.first.time, member.time))
        return max(0.0, (this - first).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}{plural if n != 1 else ''}"


def _nothing() -> tuple[Line, ...]:
    return (((Span("nothing but when, where and by which process they were written", "dim"),),),)
