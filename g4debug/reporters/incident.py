"""An incident: the dumps that several ranks wrote together, and the differences between them.

The first finding is shown in full, by the same reporters as a single dump. This module adds the
rest: who was first, the other findings in a line each, and the differences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from g4debug.dumps.heads import Head, quoted
from g4debug.dumps.incidents import Dump, Incident, seconds_after
from g4debug.dumps.plain import to_plain
from g4debug.findings.record import Step, TrapRecord
from g4debug.reporters import json
from g4debug.reporters._evidence import length_range
from g4debug.reporters._facts import Entry, Line, Span
from g4debug.reporters.text import NOTHING_FOUND, OTHER_RANK, counted, shorten

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
class Member(Dump):
    """One dump. record: None if it was not read: ``broken`` says why, or it was one too many."""

    record: TrapRecord | None = None


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
    """The lines above the first finding: the incident, and which rank was first."""
    whole = Incident(view.members)
    hosts = len(whole.hosts)
    seconds = max(seconds_after(view.first, m) for m in view.members)
    where = f" on {counted(hosts, 'host')}" if hosts else ""
    dumps, processes = counted(len(view.members), "dump"), counted(whole.processes, "process")
    lines = [
        _said(f"{dumps} of {processes}{where}, within {seconds:.1f} s", "strong"),
        _said(f"first: {_who(view.first.head, labels(view)[0])}; its finding follows in full"),
    ]
    if hosts > 1:
        lines.append(_said("who was first is as true as the clocks of the hosts", "dim"))
    unread = sum(m.record is None and not m.broken for m in view.members)
    if unread:
        text = f"{counted(unread, 'dump')} were not read whole: what differs in them is not told"
        lines.append(_said(text, "warn"))
    if view.elsewhere:
        others = counted(view.elsewhere, "other incident")
        lines.append(_said(f"{others} here: g4debug list tells them apart", "dim"))
    return [Entry("INCIDENT", tuple(lines))]


def after(view: View) -> list[Entry]:
    """The other findings, and what differs between the dumps."""
    entries = []
    rest = list(zip(view.members, labels(view), strict=True))[1:]
    if rest:
        lines = [_line(view, member, label) for member, label in rest]
        entries.append(Entry("OTHERS", _some(lines, "more")))
    if sum(m.record is not None for m in view.members) > 1:
        told = [_told(d) for d in differences(view)]
        nothing = "nothing but when, where and by which process they were written"
        told = told or [_said(nothing, "dim")]
        entries.append(Entry("DIFFERS", _some(told, "more differences")))
    return entries


def _some(lines: Sequence[Line], what: str) -> tuple[Line, ...]:
    more = len(lines) - SHOWN
    left_out = (_said(f"{more} {what} (--json)", "dim"),) if more > 0 else ()
    return (*lines[:SHOWN], *left_out)


def differences(view: View) -> list[Difference]:
    """The differences between all dumps that could be read, the most telling first."""
    known = [
        (label, member.record)
        for label, member in zip(labels(view), view.members, strict=True)
        if member.record is not None
    ]
    tables = [(label, _facts_of(record)) for label, record in known]
    named = [
        _difference(name, ((label, table.get(name, UNKNOWN)) for label, table in tables))
        for name in dict.fromkeys(name for _, table in tables for name in table)
    ]
    return _in_first_step(known) + [d for d in named if len(d.values) > 1]


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
                "path": str(m.path),
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
        "first": to_plain(view.record),
    }
    json.write(data, stream)


def _facts_of(record: TrapRecord) -> dict[str, str]:
    """The facts of a dump that are compared: name -> value."""
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
    return f"{mode}, {counted(n, 'request')}{lengths}" + (f" ({rids}{more})" if rids else "")


def _in_first_step(known: Sequence[tuple[str, TrapRecord]]) -> list[Difference]:
    """The differences in the first step in which ranks of the same batch differ.

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
                _difference(
                    f"{name} of step {number}",
                    ((who, value(steps[number])) for who, steps in group),
                )
                for name, value in _STEP.items()
            ]
            if there := [d for d in there if len(d.values) > 1]:
                found += there
                break
    return found


def _difference(name: str, values: Iterable[tuple[str, str]]) -> Difference:
    """values: each label, with its value."""
    labels: dict[str, tuple[str, ...]] = {}
    for label, value in values:
        labels[value] = (*labels.get(value, ()), label)
    return Difference(name, labels)


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
    head, file = member.head, (Span(quoted(member.path.name), "dim"),)
    if member.broken:
        return ((Span(label), Span(f"cannot be read: {member.broken}", "warn")), file)
    what = head.headline.removeprefix("g4debug: ") or f"{head.check}: {head.kind}"
    if head.kind == OTHER_RANK:
        what = NOTHING_FOUND
    after = f"+{seconds_after(view.first, member):.1f} s"
    step = _said(f"step {head.step}") if head.step >= 0 else ()
    return ((Span(after, "dim"), Span(label, "strong")), *step, (Span(shorten(what, 160)),), file)


def _told(difference: Difference) -> Line:
    values = (
        (Span(f"{', '.join(who)}:", "dim"), Span(shorten(value, 120)))
        for value, who in difference.values.items()
    )
    return ((Span(difference.name, "strong"),), *values)


def _who(head: Head, label: str) -> str:
    host = f"{head.host} " if head.host and not label.startswith(head.host) else ""
    pid = f", pid {head.pid}" if head.pid >= 0 and "pid" not in label else ""
    return f"{host}{label}{pid}"


def _said(text: str, tone: str = "") -> Line:
    return ((Span(text, tone),),)
