"""Runs corruptions by their seeds, grades them, and prints the table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import render
from harness.verdicts import not_completed
from rich.console import Console
from rich.table import Table

from suites.fuzz import forks, page
from suites.fuzz.corrupt_variant import SERVERS
from suites.fuzz.corruption import FORMS, Corruption, draw
from suites.fuzz.grade import BAD, FALSE, HARMLESS, NOTHING, TOLD, VERDICTS, Grade, grade
from suites.fuzz.page import Case
from suites.healthy.run import launch

RUNS = 100
FIRST = FORMS  # the seeds from there on draw all forms
# A tracer that was never run on this release is armed, too: a false finding harms nobody here.
ANYWHERE = {"G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}
START = 300.0  # seconds in which an engine must be up and warm


def server_of(seed: int) -> str:
    """The server of a seed."""
    return list(SERVERS)[seed % len(SERVERS)]


def run(console: Console, first: int, runs: int, folder: Path, out: Path | None = None) -> bool:
    """True if nothing is bad, and something was told. out: where the page is written."""
    seeds = range(first, first + runs)
    cases: list[Case] = []
    unsound: dict[str, str] = {}  # server -> why nothing can be compared with it
    for server in SERVERS:
        mine = [seed for seed in seeds if server_of(seed) == server]
        if not mine:
            continue
        place = folder / server
        for old in (*place.glob("*.json"), *place.glob("*.fired")):
            old.unlink()
        arguments = {"server": server, "seeds": mine}
        timeout = START + forks.SECONDS * (len(mine) + 2)
        module = "suites.fuzz.corrupt_variant"
        outcome = launch(module, arguments, ANYWHERE, True, place, timeout)
        plain = _read(place / "plain.json")
        problem = "" if outcome.completed else not_completed(outcome)
        problem = problem or unfit(plain, _read(place / "again.json"))
        if problem:
            render.say(console, f"{server}: {problem}", style="bold red")
            unsound[server] = problem
        for seed in mine if plain else ():
            case = draw(seed, SERVERS[server][0])
            got = _read(place / f"{seed}.json")
            if not got:
                continue
            graded = grade(case, got, plain)
            cases.append(Case(server, case, graded))
            tell(console, folder, server, case, got, graded)
    console.print(table(cases))
    total = Counter(it.grade.verdict for it in cases)
    said = ", ".join(f"{total[v]} {v}" for v in VERDICTS if total[v])
    late = max((it.grade.late for it in cases), default=-1)
    render.say(console, f"{said}. The latest was told {late} steps after it was done.")
    if out is not None:
        page.corruptions(out, seeds, cases, unsound)
        render.for_copying(console, "The page is in:", str(out))
    return not unsound and total[TOLD] > 0 and not any(total[v] for v in BAD)


def unfit(plain: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Why nothing can be compared with this server. '' if it can."""
    if not plain or not again:
        return "the scheduler has not served the traffic that nothing strikes"
    for run in (plain, again):
        if run.get("finding"):
            return f"{FALSE}: {run['finding']['headline']}"
        for check, kind, _ in run.get("findings") or ():
            return f"{FALSE}: {check}: {kind}"
        if run.get("error"):
            return f"without a corruption it ends: {run['error']}"
    if not plain["tokens"]:
        return "the scheduler was given no requests"
    return "" if plain["tokens"] == again["tokens"] else "two equal runs have different tokens"


def tell(
    console: Console,
    folder: Path,
    server: str,
    case: Corruption,
    got: Mapping[str, Any],
    graded: Grade,
) -> None:
    """A line for people, and one of JSON."""
    line = {
        "seed": case.seed,
        "server": server,
        "what": case.what,
        "form": case.form,
        "to": case.to,
        "moment": case.moment,
        "case": case.words,
        "verdict": graded.verdict,
        "tracer": graded.tracer,
        "late": graded.late,
        "text": graded.text,
        **{k: got.get(k) for k in ("fired", "finding", "error", "disarmed", "findings")},
    }
    with (folder / "cases.jsonl").open("a") as sink:
        sink.write(json.dumps(line) + "\n")
    style = "bold red" if graded.verdict in BAD else ""
    if graded.verdict in (HARMLESS, NOTHING):
        style = "dim"
    done = (got.get("fired") or {}).get("words", "")
    text = f"{case.seed} {server}: {graded.verdict}: {case.words}"
    render.say(console, text + (f" [{done}]" if done else ""), style=style)
    if graded.verdict not in (HARMLESS, NOTHING):
        allowed = f", allowed: {graded.allowed}" if graded.allowed else ""
        when = f" ({graded.late} steps late{allowed})" if graded.late > 0 else ""
        render.say(console, graded.text + when, indent=4, style="dim")


def table(cases: Sequence[Case]) -> Table:
    """One row for each structure, and a column for each verdict that occurs."""
    columns = [v for v in VERDICTS if any(it.grade.verdict == v for it in cases)]
    made = Table("corrupted", *columns)
    for what in sorted({it.corruption.what for it in cases}):
        count = Counter(it.grade.verdict for it in cases if it.corruption.what == what)
        made.add_row(what, *(str(count[v] or "") for v in columns))
    return made


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
