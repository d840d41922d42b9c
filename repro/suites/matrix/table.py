"""The lines that ``make matrix`` prints for each fault, and its table for docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.pages import fill
from harness.render import Block

from g4debug import discovery
from g4debug.cpu.server import DEFAULT
from suites.matrix.drill import REQUESTS, WAVES, Clean, Drill, Row


def entry(row: Row, tracer: str) -> str:
    """``3``: the tracer that must catch it did so 3 steps later. ``(3)``: a tracer that need not
    catch it did. ``·``: a tracer that need not catch it did not.
    """
    if row.fired < 0:
        return "?"
    if tracer in row.caught:
        after = str(row.caught[tracer])
        return after if tracer in row.named else f"({after})"
    return "**MISSED**" if tracer in row.named else "·"


def watch_entry(row: Row) -> str:
    """The same for a server with watch, whatever the tracer: that which must tell it, or all."""
    if row.watch is None or row.fired < 0:
        return "?"
    if row.watched:
        return str(row.watch.get(row.watched, "**MISSED**"))
    return ", ".join(f"({tracer} {after})" for tracer, after in row.watch.items()) or "·"


def block(row: Row, place: str = "") -> Block:
    """The lines on a row for a terminal; the table is too wide for one."""
    what = f"{row.verdict} Without tracers a user sees: {row.seen}."
    return Block(row.name, row.good, what, title=place)


def clean_block(clean: Clean) -> Block:
    what = f"Without tracers: {clean.seen}. With every tracer: {clean.verdict}."
    return Block(f"no fault{clean.on}", clean.good, what)


def markdown(
    clean: Sequence[Clean],
    rows: Sequence[Row],
    model: str = DEFAULT,
    without: Sequence[Drill] = (),
    not_run: Sequence[Drill] = (),
    backend: str = "",
) -> str:
    """The table with its legend. The numbers differ a little from run to run.

    without: the drills that the model cannot have. not_run: those that it has, and that did not run
    this time. backend: the attention backend that was asked for, '' for none.
    """
    named = "" if model == DEFAULT and not backend else model
    given = {"model": named, "backend": backend}
    return fill(
        Path(__file__).with_name("page.md.j2"),
        clean=clean,
        rows=rows,
        model=f"{model} on {backend}" if backend else named,
        arguments=" ".join(f"--{name} {value}" for name, value in given.items() if value),
        without=without,
        not_run=not_run,
        tracers=discovery.names("tracer"),
        entry=entry,
        watch=any(row.watch is not None for row in rows),
        watch_entry=watch_entry,
        waves=WAVES,
        requests=REQUESTS,
    )
