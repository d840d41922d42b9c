"""Draws the table: a row a bug, a column a tool, and in each cell how much the tool told."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from harness.pages import fill

from suites.history import grades, table
from suites.history.case import PUT_BACK
from suites.history.cell import ABSENT
from suites.history.table import NOT_RUN, Entry, Row
from suites.history.tools import TOOLS, Tool

HERE: Final = Path(__file__).parent
LEFT, TOP, WIDE, HIGH, GAP = 318, 132, 112, 34, 5
# grade -> its colour, and what it is called. From nothing told to the cause told; readable in black
# on each of them, and in print.
LEGEND: Final = {
    grades.SILENT: ("#ffffff", "silent"),
    grades.STANDS: ("#f3e0ea", "stands"),
    grades.CRASH: ("#fbe3c8", "crash only"),
    grades.LATE: ("#f6d78b", "late"),
    grades.ALARM: ("#cfe8b5", "alarm"),
    grades.OBJECT: ("#9fd49b", "page and request"),
    grades.CAUSE: ("#5fb878", "cause"),
    grades.NA: ("#f2f2f2", "n/a"),
    NOT_RUN: ("#fafafa", "not run"),
    "false": ("#e58b8b", "false alarm"),
}


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
    for colour, text in LEGEND.values():
        legend.append({"x": x, "colour": colour, "text": text})
        x += 44 + 7 * len(text)
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
        wide=WIDE,
    )


def _lines(title: str) -> list[str]:
    """The title above a column: the tool's name, and its setting, as wide as the column."""
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


def _cell(column: int, entry: Entry, tool: str) -> dict[str, Any]:
    (colour, text), when = LEGEND[entry.grade], ""
    if entry.false:
        colour, when = LEGEND["false"][0], f"{entry.false} of {entry.healthy} healthy"
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
    title = f"{TOOLS[tool].title}: {entry.said}"
    return {"x": _x(column), "colour": colour, "text": text, "when": when, "title": title}
