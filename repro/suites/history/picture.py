"""Draws the table: a row a bug, a column a tool, and in each cell how much the tool told."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from harness.pages import fill

from suites.history import grades, table
from suites.history.case import PUT_BACK
from suites.history.cell import ABSENT
from suites.history.table import NOT_RUN, Entry, Row
from suites.history.tools import TOOLS, Tool

HERE: Final = Path(__file__).parent
LEFT, TOP, WIDE, HIGH, GAP = 318, 132, 112, 34, 5
# From nothing told to the cause told; readable in black on each of them, and in print.
COLOURS: Final = {
    grades.NA: "#f2f2f2",
    NOT_RUN: "#fafafa",
    grades.SILENT: "#ffffff",
    grades.CRASH: "#fbe3c8",
    grades.LATE: "#f6d78b",
    grades.ALARM: "#cfe8b5",
    grades.OBJECT: "#9fd49b",
    grades.CAUSE: "#5fb878",
}
FALSE: Final = "#e58b8b"
MEANING: Final = {
    grades.SILENT: "silent",
    grades.CRASH: "crash only",
    grades.LATE: "late",
    grades.ALARM: "alarm",
    grades.OBJECT: "page and request",
    grades.CAUSE: "cause",
    grades.NA: "n/a",
    NOT_RUN: "not run",
}


@dataclass(frozen=True)
class _Cell:
    x: int
    width: int
    colour: str
    text: str
    when: str
    title: str


def svg(found: Sequence[Row]) -> str:
    tools = table.columns(found)
    ran = [r for r in found if r.ran]
    rows = [
        {
            "y": TOP + n * (HIGH + GAP + 4),
            "name": f"{row.case.number}  {row.name}",
            "detail": f"SGLang {row.case.buggy.release}"
            + (", put back" if row.case.origin == PUT_BACK else "")
            + (" · not valid" if row.problem else ""),
            "cells": [_cell(i, row.entries[t], t) for i, t in enumerate(tools)],
        }
        for n, row in enumerate(ran)
    ]
    legend, x = [], 24
    for grade, text in MEANING.items():
        legend.append({"x": x, "colour": COLOURS[grade], "text": text})
        x += 44 + 7 * len(text)
    legend.append({"x": x, "colour": FALSE, "text": "false alarm"})
    columns = [
        {"x": _x(i) + WIDE / 2, "lines": _lines(TOOLS[t].title)} for i, t in enumerate(tools)
    ]
    return fill(
        HERE / "picture.svg.j2",
        width=_x(len(tools)) + 20,
        height=TOP + len(rows) * (HIGH + GAP + 4) + 16,
        legend=legend,
        columns=columns,
        rows=rows,
        high=HIGH,
    )


def _lines(title: str) -> list[str]:
    """A column's title, above it: who it is of, and which setting, as wide as the column."""
    whose, _, setting = title.partition(", ")
    return [whose, *textwrap.wrap(setting, 16)]


def _why_not(tool: Tool, said: str) -> str:
    if tool.ours:
        return "refuses that release"
    if said == ABSENT:
        return "not run"
    if said == tool.no_mtp:
        return "not with MTP"
    if tool.since and said.endswith(f" from {tool.since} on"):
        return f"from {tool.since} on"
    return "part of the default" if tool.within else "does not start"


def _x(column: int) -> int:
    return LEFT + column * (WIDE + GAP)


def _cell(column: int, entry: Entry, tool: str) -> _Cell:
    colour = COLOURS.get(entry.grade, COLOURS[grades.NA])
    text, when = MEANING.get(entry.grade, entry.grade), ""
    if entry.false:
        colour, when = FALSE, f"{entry.false} of {entry.healthy} healthy"
    elif entry.alarms:
        steps = f"+{entry.after:g} step{'s' * (entry.after != 1)}"
        if entry.after <= 0:
            steps = "same step" if entry.after == 0 else "before it"
        when = f"{entry.alarms} of {entry.seeds}, {steps}"
    elif entry.prevented and not entry.seeds:
        text, when = "prevents it", f"{entry.prevented} of {entry.void}"
    elif entry.grade == grades.NA:
        when = _why_not(TOOLS[tool], entry.said)
    elif entry.seeds and not entry.valid:
        when = "not valid"
    return _Cell(_x(column), WIDE, colour, text, when, f"{TOOLS[tool].title}: {entry.said}")
