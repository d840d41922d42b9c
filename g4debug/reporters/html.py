"""The report as one HTML page, for a phone or a ticket.

It has the same facts as on the terminal (``_facts.py``), but cause, fix and next command stand near
the top. The page contains no
script, its Content-Security-Policy would not run one, and it fetches nothing. All text of the dump
is cleaned as for a terminal, and then escaped by jinja2.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from g4debug import __version__
from g4debug.findings.record import Pool, TrapRecord
from g4debug.reporters import _facts
from g4debug.reporters import _table_words as words
from g4debug.reporters._histories import percent
from g4debug.reporters._table_view import TableView, window
from g4debug.reporters.text import UNICODE, fit

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
    environment = _environment()
    style = Markup(environment.get_template("report.css").render())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        title=_facts.headline(record),
        groups=_groups(record, source, before, after),
        style=style,
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'",
        made=f"g4debug {__version__}, {record.created}",
    )


def _groups(
    record: TrapRecord,
    source: str,
    before: Sequence[_facts.Entry],
    after: Sequence[_facts.Entry],
) -> list[list[_facts.Block]]:
    """Where, then why and what to do, then the evidence: a page is read from the top.

    (On a terminal the reader sees the last lines first.)
    """
    where, *evidence, verdict = _facts.report(record, source=source, most=MOST, before=before)
    others: list[list[_facts.Block]] = [list(after)] if after else []
    return [where, verdict, *others, *evidence]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("g4debug.reporters"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_clean,
    )
    environment.tests["entry"] = lambda b: isinstance(b, _facts.Entry)
    environment.tests["pools"] = lambda b: isinstance(b, _facts.Pools)
    environment.tests["map"] = lambda b: isinstance(b, _facts.Map)
    environment.tests["history"] = lambda b: isinstance(b, _facts.History)
    environment.globals.update(page_map=_page_map, meter=_meter)
    return environment


def _clean(value: Any) -> Any:
    """Clean every text that the template writes: a right-to-left mark would rearrange the page."""
    return fit(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _page_map(block: _facts.Map) -> dict[str, Any]:
    """What the template needs of a page table: the part around the bad cell, and the words."""
    view = TableView(block.table, block.row, block.column)
    rows = window(view.rows, view.focus[0], ROWS)
    used = min(view.columns, max(view.used_columns(rows), view.focus[1] + 1) + 1)
    columns = window(used, view.focus[1], COLUMNS)
    bad, more = words.bad_cells(view)
    kinds = {c.kind for r in rows for c in view.cells(r, columns.start, columns.stop)}
    reach, inside = words.reach(view, str)
    return {
        "title": words.title(view),
        "pool": f"{block.table.pool.name} pool: {words.pool_range(view)}",
        "reach": reach,
        "inside": inside,
        "columns": [view.column0 + c for c in columns],
        "rows": [_row(view, r, columns) for r in rows],
        "focus": (view.row0 + view.focus[0], view.column0 + view.focus[1]),
        # A narrow screen is scrolled to this column. The row's number hides what is before it.
        "begin": (view.row0 + view.focus[0], view.column0 + view.focus[1] - 4),
        "left_out": [
            f"{n} {what}"
            for n, what in (
                (rows.start, "rows above"),
                (view.rows - rows.stop, "rows below"),
                (columns.start, "columns before"),
                (used - columns.stop, "columns after"),
            )
            if n
        ],
        "legend": [(k, text) for k, text in words.MEANINGS.items() if k in kinds],
        "symbols": {**SYMBOLS, "good": "12", "bad": "n", "zero": "0"},
        "bad_head": words.bad_head(view),
        "bad": bad,
        "more": more,
        "elsewhere": words.elsewhere(view, block.pools),
    }


def _row(view: TableView, row: int, columns: range) -> dict[str, Any]:
    return {
        "number": view.row0 + row,
        "rid": words.rid(view, row),
        "tokens": str(int(view.table.seq_lens[row])),
        "bad": bool(view.bad[row].any()),
        "cells": [
            (view.column0 + c, cell.kind, SYMBOLS.get(cell.kind) or str(cell.value))
            for c, cell in zip(columns, view.cells(row, columns.start, columns.stop), strict=True)
        ],
    }


def _meter(pool: Pool) -> dict[str, Any]:
    usage = pool.usage
    share = 0.0 if usage is None else max(0.0, min(usage, 1.0))
    text = "" if usage is None else percent(pool.used_tokens, pool.tokens)
    level = "bad" if share >= 0.95 else "warn" if share >= 0.8 else "good"
    return {
        "known": usage is not None,
        "width": round(share * 100),
        "percent": text,
        "level": level,
    }
