"""Writes docs/history.md: the table, the tools' words, and the predictions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.pages import fill

from g4debug.cpu.server import DEFAULT
from suites.history import across, picture, replays, reports, table
from suites.history.across import Answer
from suites.history.case import PUT_BACK, Arm, Case
from suites.history.cases import cases
from suites.history.plugin import PUT_BACK as PUT_BACK_MODULE
from suites.history.table import Row
from suites.history.tools import TOOLS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE, PICTURE = ROOT / "docs" / "history.md", ROOT / "docs" / "history.svg"
REPORTS = ROOT / "docs" / "history"
CELLS = REPORTS / "cells.jsonl"  # every cell of the table
REPLAYS = REPORTS / "replays.jsonl"
FIRST = HERE / "first.json"  # what each tool said in the first run, and of which commit


def write(
    known: Mapping[str, Case],
    by_model: Mapping[str, Sequence[Row]],
    results: Path,
    cells: str,
    releases: Mapping[str, Mapping[str, Answer]],
) -> list[Path]:
    """The page, the picture, the cells, and the report of one finding of each case.

    by_model: model -> its rows. results: the folder with the runs and their dumps. cells: all of
    them, as text. releases: see ``markdown``. Rows that ran for the first time are entered as such.
    """
    found = by_model[DEFAULT]
    first = _first(found)
    pages = reports.write(known, results, REPORTS)
    PAGE.write_text(markdown(found, first, set(pages), releases, _others(by_model)))
    PICTURE.write_text(picture.svg(found))
    CELLS.write_text(cells)
    REPLAYS.write_text(replays.as_text(r for row in found for r in row.replays))
    return [PAGE, PICTURE, CELLS, REPLAYS, FIRST, *pages.values()]


def _first(found: Sequence[Row]) -> dict[str, Any]:
    """row -> tool -> the tool's entry from its first run, and the commit of that run."""
    kept: dict[str, Any] = json.loads(FIRST.read_text()) if FIRST.is_file() else {}
    commit = _commit()
    for name, said in table.as_json(found).items():
        row = kept.setdefault(name, {})
        for tool, entry in said.items():
            row.setdefault(tool, {"commit": commit, **entry})
    FIRST.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def markdown(
    found: Sequence[Row],
    first: Mapping[str, Any],
    reported: Collection[str] = (),
    releases: Mapping[str, Mapping[str, Answer]] = MappingProxyType({}),
    others: Mapping[str, Sequence[Row]] = MappingProxyType({}),
) -> str:
    """reported: the cases that have a page with a finding. releases: case -> release -> whether
    that release has the bug, from ``across.answers``; empty if no release was run. others: another
    model -> the rows that ran on it."""
    ran = [r for r in found if r.ran]
    tools = table.columns(found)
    return fill(
        HERE / "page.md.j2",
        found=found,
        ran=ran,
        tools={t: TOOLS[t].title for t in tools},
        totals=_totals(ran, tools, first),
        gpus=sorted({t.where for r in found for t in (r.truth, r.gpu) if t.where}),
        on_gpus=_on_gpus(ran, tools),
        not_run=_not_run(found, tools),
        seeds=across.SEEDS,
        releases=across.releases(),
        answers=releases,
        reasons=across.reasons(releases),
        numbers={name: case.number for name, case in cases().items()},
        first=first,
        reported=reported,
        others=others,
        gemma={row.name: row for row in ran},
        bare=sum(not replay.truth for row in found for replay in row.replays),
        innocent=any(r.word == replays.INNOCENT for row in found for r in row.replays),
        arm=_arm,
        cell=_cell,
    )


def _others(by_model: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Model -> the rows that ran, of all models but Gemma-4."""
    return {m: [r for r in rows if r.ran] for m, rows in by_model.items() if m != DEFAULT}


def _totals(
    ran: Sequence[Row], tools: Sequence[str], first: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Kind of case -> in how many of them each tool told."""
    natural = [r for r in ran if r.case.origin != PUT_BACK]
    groups = {
        "natural": natural,
        "put back": [r for r in ran if r.case.origin == PUT_BACK],
        "natural, chosen when the tracers existed": [r for r in natural if r.case.chosen_after],
    }
    found = {}
    for name, group in groups.items():
        if group:
            found[name] = [table.rates(group, t) for t in tools]
            found[f"{name}, in the first run"] = [table.first_rates(group, t, first) for t in tools]
    return found


def _on_gpus(ran: Sequence[Row], tools: Sequence[str]) -> list[str]:
    """The columns and cases of the table that ran on a GPU, in words."""
    needs = [TOOLS[t].title for t in tools if TOOLS[t].gpu]
    numbers = [str(r.case.number) for r in ran if r.case.gpu]
    what = [f"the columns *{'* and *'.join(needs)}*"] * bool(needs)
    return what + [f"case {', '.join(numbers)}"] * bool(numbers)


def _not_run(found: Sequence[Row], tools: Sequence[str]) -> list[str]:
    """The tools and cases that did not run, for want of a GPU: nobody may take it for a miss."""
    missing = [f"the tool {t.title}: it {t.gpu}" for i, t in TOOLS.items()
               if t.gpu and i not in tools]  # fmt: skip
    return missing + [f"case {r.case.number}, {r.name}: {r.case.gpu}"
                      for r in found if r.case.gpu and not r.ran]  # fmt: skip


def _arm(case: Case, arm: Arm) -> str:
    """The arm's release, with our fix, the fault and the switches in it."""
    more = [f"our fix {', '.join(arm.fixes)}"] if arm.fixes else []
    more += [f"put back by `{arm.faults}`"] if arm.faults else []
    environ = {**case.environ, **arm.environ}
    put_back = environ.pop(PUT_BACK_MODULE, "")
    more += [f"put back by `put_back/{put_back}.py`"] if put_back else []
    more += [f"`{k}={v}`" for k, v in environ.items()]
    more += [f"`{k}={v}`" for k, v in arm.engine.items()]
    return arm.release + (f" ({'; '.join(more)})" if more else "")


def _cell(text: str) -> str:
    """Text as a cell of a table: in one line, and nothing in it ends the cell."""
    short = " ".join(text.split()).replace("|", "\\|")
    return (short[:157] + "…") if len(short) > 158 else short
