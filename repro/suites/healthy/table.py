"""The output of ``repro/healthy.py`` for each group, and the page that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.pages import fill
from harness.render import Block

from g4debug.cpu import toys
from g4debug.cpu.server import DEFAULT
from suites.healthy.run import (
    HANG_SECONDS,
    LEAK_STEPS,
    STARVED_STEPS,
    Done,
    Ran,
    Served,
    added,
    checkers,
)


def block(ran: Ran) -> Block:
    """The lines on a group for a terminal."""
    group = ran.group
    if group.refused:
        what = ran.problem or f"SGLang cannot run it here, as expected: {group.refused}"
        return Block(group.id, ran.good, what, title=group.title)
    bad = [f"{d.workload.what}: {d.problem}" for d in ran.done if d.problem]
    what = "; ".join([ran.problem] if ran.problem else bad)
    if not what:
        requests, checks = sum(d.requests for d in ran.done), sum(map(_total, ran.done))
        what = f"{len(ran.done)} workloads, {requests} requests, {checks} checks, no finding."
        what += f" Replayed: {ran.replayed}." if ran.replayed else ""
    return Block(group.id, ran.good, what, title=group.title)


def served_block(served: Served) -> Block:
    sent = sum(served.sent.values())
    what = served.problem or f"{sent} requests, {sum(served.checked.values())} checks, no finding."
    title = f"launch_server under load for {served.minutes:g} minutes"
    return Block("server", not served.problem, what, title=title)


def _total(done: Done) -> int:
    return sum(done.checked.values())


def markdown(
    runs: Sequence[Ran],
    served: Served | None,
    model: str = DEFAULT,
    without: Mapping[str, str] = MappingProxyType({}),
    not_run: Sequence[str] = (),
) -> str:
    """The whole page. The numbers differ a little from run to run.

    without: the groups that the model cannot have, and why. not_run: those that it has, and that
    did not run this time.
    """
    real = [r for r in runs if not r.group.refused]
    return fill(
        Path(__file__).with_name("page.md.j2"),
        runs=runs,
        real=real,
        served=served,
        workloads=_workloads(real),
        idle=_said(real, lambda ran: ran.group.idle),
        limits=_said(real, lambda ran: ran.limits),
        checkers=checkers(),
        leak_steps=LEAK_STEPS,
        hang_seconds=HANG_SECONDS,
        starved_steps=STARVED_STEPS,
        model="" if model == DEFAULT else model,
        drafts=bool(toys.load(model).draft),
        without=without,
        not_run=not_run,
        counted=_counted,
    )


def _counted(facts: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{count} {what}" for what, count in facts)


def _workloads(runs: Sequence[Ran]) -> list[dict[str, Any]]:
    """A row for each workload, over all engines on which it ran."""
    rows: dict[str, list[tuple[Ran, Done]]] = {}
    for ran in runs:
        for done in ran.done:
            rows.setdefault(done.workload.id, []).append((ran, done))
    return [
        {
            "what": found[0][1].workload.what,
            "how": found[0][1].workload.how,
            "engines": ", ".join(f"`{ran.group.id}`" for ran, _ in found),
            "requests": sum(done.requests for _, done in found),
            "happened": _counted(added(done.facts for _, done in found).items()),
            "checks": sum(_total(done) for _, done in found),
            "result": _result(found),
        }
        for found in rows.values()
    ]


def _result(found: list[tuple[Ran, Done]]) -> str:
    bad = [f"**{ran.group.id}: {d.problem}**" for ran, d in found if d.problem]
    if bad:
        return "; ".join(bad)
    others = [f"`{ran.group.id}`" for ran, d in found if not d.workload.compare]
    if len(others) == len(found):
        return "no finding"
    beside = f" (not compared on {', '.join(others)})" if others else ""
    return f"no finding, the same tokens{beside}"


def _said(
    runs: Sequence[Ran], of: Callable[[Ran], Mapping[str, str]]
) -> dict[tuple[str, str], list[str]]:
    """A tracer and a sentence about it -> the engines on which the sentence is true."""
    engines: dict[tuple[str, str], list[str]] = {}
    for ran in runs:
        for item in of(ran).items():
            engines.setdefault(item, []).append(f"`{ran.group.id}`")
    return engines
