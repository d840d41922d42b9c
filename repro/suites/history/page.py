"""Writes docs/history.md: the table, what each tool said, and what was predicted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from suites.history import picture, reports, table
from suites.history.case import PUT_BACK, Case
from suites.history.changed import CHANGED
from suites.history.left_out import LEFT_OUT
from suites.history.plugin import PUT_BACK as PUT_BACK_MODULE
from suites.history.table import Row, Truth
from suites.history.tools import TOOLS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE, PICTURE = ROOT / "docs" / "history.md", ROOT / "docs" / "history.svg"
REPORTS = ROOT / "docs" / "history"
CELLS = REPORTS / "cells.jsonl"  # every cell of the table
FIRST = HERE / "first.json"  # what each tool said in the first run, and of which commit


def write(
    known: Mapping[str, Case],
    found: Sequence[Row],
    results: Path,
    cells: str,
    releases: Sequence[str],
) -> list[Path]:
    """The page, the picture, the cells, and the report of one finding of each case.

    results: the folder with the runs and their dumps. cells: all of them, as text. releases: the
    section of ``across.markdown``. Rows that ran for the first time are entered as such.
    """
    first = _first(found)
    pages = reports.write(known, results, REPORTS)
    PAGE.write_text(markdown(found, first, set(pages), releases))
    PICTURE.write_text(picture.svg(found))
    CELLS.write_text(cells)
    return [PAGE, PICTURE, CELLS, FIRST, *pages.values()]


def _first(found: Sequence[Row]) -> dict[str, Any]:
    """row -> tool -> what it said when it ran for the first time, and the commit of that run."""
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
    releases: Sequence[str] = (),
) -> str:
    """reported: the cases of which there is the page of a finding. releases: the lines of the
    section that says which release has which bug."""
    ran = [r for r in found if r.ran]
    tools = table.columns(found)
    titles = " | ".join(TOOLS[t].title for t in tools)
    lines = [
        "# The history suite: real bugs, every tool",
        "",
        "Made by `make history`. Each row is a bug that SGLang shipped or that its developers",
        "mended, met by real SGLang on the CPU engine, or, for the last two tools and for case",
        "11, on GPUs. Each case runs on an SGLang with the bug and on one without. g4debug and",
        "SGLang's own checks ran by default and with all that their documentation has to offer,",
        "and the two other tools in their documented best setting. A ground truth that imports",
        "nothing of g4debug counts whether the bug was *reached* and *triggered*; a run in",
        "which it was not triggered proves nothing and does not count. There is one exception:",
        "a tool may stop SGLang just before the bug is counted. Its alarm counts, as *before",
        "it*, if the same seed triggers the bug without a tool, and if this tool is silent on",
        "the SGLang without the bug.",
        "",
        "![Who noticed what](history.svg)",
        "",
        "What an entry says, from worst to best:",
        "",
        "- **silent**: the tool said nothing.",
        "- **crash only**: SGLang died of the bug, and the tool said no more than SGLang did.",
        "- **late**: it raised an alarm when a wrong answer had left already.",
        "- **alarm**: it raised an alarm before that.",
        "- **object**: its alarm names the page and the request.",
        "- **cause**: its alarm names a file and a function that the fix changes: upstream's fix,",
        "  the one that was proposed there, or ours.",
        "",
        "`k/n` means that it told in k of n runs with different seeds. Steps are counted from the",
        "first trigger, and are a median. Other entries:",
        "",
        "- **n/a**: the tool cannot run there. The section of the case says why.",
        "- **does not happen with it**: the tool makes SGLang wait, so the bug was triggered in",
        "  none of its runs.",
        "- **not run**: nobody has run it yet.",
        "- **FALSE**: it accused the SGLang without the bug.",
        "- **foreign**: it told of something else, in a run that did not trigger the bug.",
        "- **not valid**: on that tool's device the case proves nothing. Its section says why.",
        "",
        "The origin of a bug:",
        "",
        "- **natural**: that release has it as it is.",
        "- **natural with flags**: it has it with settings that are not the default.",
        "- **held back**: it is a race, and the suite lets one side of it come late.",
        "- **put back**: that release does not show it by itself, so the suite puts it back in.",
        "",
        "In the section of a case, *without the bug* says in how many runs the tool was silent",
        "on the SGLang without the bug, as it should be. Runs that did not come to where the",
        "bug would be do not count; – means that there was none, so nothing is known of false",
        "alarms. The commit of a first run is that of the checkout in which its result was",
        "entered.",
        "",
        "The column *met* says in how many runs without a tool the bug was triggered. Every single",
        "run is in [cells.jsonl](history/cells.jsonl). `counter.py` in what a tool said is the",
        "suite's own: the ground truth stands between SGLang and the function that it counts.",
        "",
        f"| # | case | origin | SGLang | met | without a tool | {titles} |",
        f"|--:|---|---|---|---|---|{'---|' * len(tools)}",
    ]
    for row in ran:
        case = row.case
        entries = " | ".join(row.entries[t].words for t in tools)
        lines.append(
            f"| {case.number} | [{row.name}](#{row.name}) | {case.origin} | {case.buggy.release} | "
            f"{row.truth.triggered}/{row.truth.runs} | {_cell(row.truth.seen)} | {entries} |"
        )
    lines += ["", *_totals(ran, tools, first), "", *_on_gpus(found), "", *releases]
    for row in found:
        lines += _section(row, first.get(row.name, {}), tools)
        if row.name in reported:
            lines += [f"[What g4debug reported](history/{row.name}.html), as a page.", ""]
    lines += [
        "## Changed after a look",
        "",
        "Cases and predictions are committed before a tool runs. These were changed after somebody",
        "had seen a run, with or without a tool:",
        "",
        *(f"- {commit}: {what}." for commit, what in CHANGED),
        "",
        "## Left out",
        "",
        "These were looked at for the suite too. The list is as old as the suite, but is in this",
        "repository, and on this page, since 2026-11-25 only, two days after the first runs.",
        "",
        *(f"- {', '.join(threads)}: {why}." for threads, why in LEFT_OUT.items()),
    ]
    return "\n".join(lines) + "\n"


def _totals(ran: Sequence[Row], tools: Sequence[str], first: Mapping[str, Any]) -> list[str]:
    natural = [r for r in ran if r.case.origin != PUT_BACK]
    groups = {
        "natural": natural,
        "put back": [r for r in ran if r.case.origin == PUT_BACK],
        "natural, chosen when the tracers existed": [r for r in natural if r.case.chosen_after],
    }
    lines = [
        "Cases in which a tool told in most of the runs. There is no single score: natural bugs",
        "and bugs that were put back are counted apart, and so are the cases that were chosen",
        "when the tracers existed, because that choice could favour them: those lines are a",
        "part of the natural ones. *Of* counts the cases in which the tool ran and the bug was",
        "triggered, or would have been without the tool. Case 8 is in it as a control: it is no",
        "bug of KV pages, and no tool is expected to tell it. A tool, or what is taken for its",
        "alarm, may have been changed for a case since its first run. So there is a line of the",
        "first runs, too; each section shows both.",
        "",
        f"| cases | {' | '.join(TOOLS[t].title for t in tools)} |",
        f"|---|{'---|' * len(tools)}",
    ]
    for name, group in groups.items():
        if group:
            was = [table.first_rates(group, t, first) for t in tools]
            lines.append(f"| {name} | {' | '.join(table.rates(group, t) for t in tools)} |")
            lines.append(f"| {name}, in the first run | {' | '.join(was)} |")
    return lines


def _on_gpus(found: Sequence[Row]) -> list[str]:
    """What ran on a GPU and how, and what did not, so that nobody takes it for a miss."""
    lines = []
    where = sorted({t.where for r in found for t in (r.truth, r.gpu) if t.where})
    if where:
        needs = [TOOLS[t].title for t in table.columns(found) if TOOLS[t].gpu]
        cases = [str(r.case.number) for r in found if r.case.gpu and r.ran]
        what = [f"the columns *{'* and *'.join(needs)}*"] * bool(needs)
        what += [f"case {', '.join(cases)}"] * bool(cases)
        lines += [
            f"On a GPU ({', '.join(where)}), with real kernels and without CUDA graphs: "
            f"{', and '.join(what)}. Attention runs on `triton`, and in 0.5.23 on `trtllm_mha`. "
            "What the same workloads did there without a tool is said for each case. There an "
            "answer that differs may be no bug: in bfloat16 it depends on which requests share a "
            "batch. So no alarm is called late there.",
        ]
    missing = [f"the tool {t.title}: it {t.gpu}" for i, t in TOOLS.items()
               if t.gpu and i not in table.columns(found)]  # fmt: skip
    missing += [f"case {r.case.number}, {r.name}: {r.case.gpu}"
                for r in found if r.case.gpu and not r.ran]  # fmt: skip
    if missing:
        lines += ["", "Not in this table, because it needs a GPU and was not run:", ""]
        lines += [f"- {what}." for what in missing]
    return lines


def _section(row: Row, first: Mapping[str, Any], tools: Sequence[str]) -> list[str]:
    case = row.case
    origin = case.origin + (", chosen when the tracers existed" if case.chosen_after else "")
    lines = [
        f"## {row.name}",
        "",
        f"{case.title[0].upper()}{case.title[1:]}. {case.why}",
        "",
        f"- **Upstream:** {', '.join(case.threads) or 'no thread is known'}. **Origin:** {origin}.",
        f"- **With the bug:** SGLang {_arm(case, 'buggy')}. **Without:** SGLang "
        f"{_arm(case, 'fixed')}.",
        f"- **The fix changes:** {', '.join(f'`{f}` `{n}`' for f, n in case.cause)}.",
    ]
    if not row.ran:
        return [*lines, f"- **Not run**{f': {case.gpu}' if case.gpu else ''}.", ""]
    lines.append(_truth("Ground truth", row.truth))
    if row.gpu.runs:
        lines.append(_truth(f"On a GPU ({row.gpu.where})", row.gpu))
    lines += [
        "",
        "| tool | predicted | first run, and its commit | now | without the bug | what it said |",
        "|---|---|---|---|---|---|",
    ]
    for tool in tools:
        entry = row.entries[tool]
        was = "{words}, {commit}".format(**first[tool]) if tool in first else "not run"
        lines.append(
            f"| {TOOLS[tool].title} | {case.expected.get(tool, '–')} | {was} | {entry.words} | "
            f"{entry.without} | {_cell(entry.said)} |"
        )
    return [*lines, ""]


def _truth(title: str, truth: Truth) -> str:
    return (
        f"- **{title}:** with the bug, reached in {truth.reached} and triggered in "
        f"{truth.triggered} of {truth.runs} runs{f' ({truth.note})' if truth.note else ''}; "
        f"without it, reached in {truth.sound_reached} and triggered in {truth.sound_triggered} of "
        f"{truth.sound_runs}. **Without a tool:** {truth.seen}."
        + (f" **Not valid:** {truth.problem}." if truth.problem else "")
    )


def _arm(case: Case, name: str) -> str:
    arm = case.buggy if name == "buggy" else case.fixed
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
