"""The report as one HTML page, for a phone or a ticket.

It has the same facts as on the terminal (``_facts.py``), but cause, fix and next command stand near
the top. All text of the dump is cleaned as for a terminal, and then escaped by jinja2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment

from g4debug.findings.record import TrapRecord
from g4debug.reporters import _facts, pages
from g4debug.reporters._evidence import MEANINGS, TableView, window
from g4debug.reporters.text import UNICODE

MOST = 500  # rows of a history in the page; --json has all
ROWS, COLUMNS = 32, 48  # of the page map, around the bad cell

SYMBOLS = {"outside": UNICODE.outside, "past": UNICODE.past}


def render(
    record: TrapRecord,
    *,
    source: str = "",
    before: Sequence[_facts.Entry] = (),
    after: Sequence[_facts.Entry] = (),
) -> str:
    """The page. ``source``: the dump's path. before, after: see ``_facts.report``."""
    groups = _groups(record, source, before, after)
    title = _facts.headline(record)
    return pages.page(environment(), "report", record.created, title=title, groups=groups)


def _groups(
    record: TrapRecord, source: str, before: Sequence[_facts.Entry], after: Sequence[_facts.Entry]
) -> list[list[_facts.Block]]:
    """Where, then why and what to do, then the evidence: a page is read from the top.

    (On a terminal the reader sees the last lines first.)
    """
    where, *evidence, verdict = _facts.report(
        record, source=source, most=MOST, rows=ROWS, number=str, before=before, after=after
    )
    others = [evidence.pop()] if after else []
    return [where, verdict, *others, *evidence]


@cache
def environment() -> Environment:
    """The templates, with what they need to know of a report's blocks."""
    made = pages.environment()
    made.tests["entry"] = lambda b: isinstance(b, _facts.Entry)
    made.tests["pools"] = lambda b: isinstance(b, _facts.Pools)
    made.tests["map"] = lambda b: isinstance(b, _facts.Map)
    made.tests["history"] = lambda b: isinstance(b, _facts.History)
    made.globals.update(page_map=_page_map)
    return made


def _page_map(view: TableView) -> dict[str, Any]:
    """The columns that the page has room for, and the number of those left out."""
    near = len(view.bad_columns)
    columns = window(near, view.focus[1] - view.column0, COLUMNS)
    before, after = view.before + columns.start, near - columns.stop + view.after
    asides = (
        (view.above.rows, "rows above"),
        (view.below.rows, "rows below"),
        (before, "columns before"),
        (after, "columns after"),
    )
    shown = slice(columns.start, columns.stop)
    kinds = {kind for row in view.rows for kind, _ in row.cells[shown]}
    return {
        "columns": [view.column0 + c for c in columns],
        "shown": shown,
        # A narrow screen is scrolled to this column. The row's number hides what is before it.
        "begin": (view.focus[0], view.focus[1] - 4),
        "left_out": [f"{n} {what}" for n, what in asides if n],
        "legend": [(k, text) for k, text in MEANINGS.items() if k in kinds],
        "symbols": {**SYMBOLS, "good": "12", "bad": "n", "zero": "0"},
    }
