"""Runs SGLang's own bugs against every tool, and writes the table of who noticed what.

    python repro/history_suite.py [--case NAME ...] [--tool NAME ...] [--seeds K] [--results FOLDER]

Each case is a real bug of SGLang, in a release that has it or put back, with a workload and a
ground truth that knows nothing of the tools. Each cell of the table is real SGLang on the CPU
engine, in a process of its own: a case, one of its arms (with the bug, without it), a tool and a
seed. A cell that has a result in FOLDER is not run again.

The exit code is 0 if every cell that ran is valid and no tool of ours accused a healthy arm, 1 if
not, and 2 for wrong arguments.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _render
from _history import page, table
from _history.case import Case
from _history.cases import cases
from _history.cell import BUGGY, FIXED, RIGHT, Cell, arm_of, interpreter, keep, kept, run
from _history.tools import TOOLS
from _run import script
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SEEDS = 5
JOBS = 2  # an engine keeps one core busy
NOTHING = "nothing"


@dataclass(frozen=True)
class Task:
    name: str
    case: Case
    arm: str
    tool: str
    seed: int

    @property
    def id(self) -> str:
        return f"{self.name}.{self.arm}.{self.tool}.{self.seed}"


def reference(case: Case) -> str:
    """The arm whose answers, without a tool, are the right ones."""
    return FIXED if case.right is None else RIGHT


def tasks(
    chosen: Mapping[str, Case], tools: Sequence[str], seeds: int
) -> Iterator[tuple[list[Task], list[Task]]]:
    """Per case: what gives the right answers, and after it the rest, without a tool first."""
    for name, case in chosen.items():
        first = [Task(name, case, reference(case), NOTHING, s) for s in range(seeds)]
        rest = [
            Task(name, case, arm, tool, seed)
            for tool in (NOTHING, *(t for t in tools if t != NOTHING))
            for seed in range(seeds)
            for arm in (BUGGY, FIXED)
        ]
        known = {t.id for t in first}
        yield first, [t for t in rest if t.id not in known]


def missing(chosen: Mapping[str, Case]) -> dict[str, list[str]]:
    """release -> the cases that need an environment of it, which is not there."""
    found: dict[str, list[str]] = {}
    for name, case in chosen.items():
        for release in {arm_of(case, arm).release for arm in (BUGGY, FIXED, RIGHT)}:
            if not interpreter(release).exists():
                found.setdefault(release, []).append(name)
    return found


def done(task: Task, folder: Path, right: Mapping[int, Mapping[str, Any]]) -> Cell:
    cell = kept(task.id, folder)
    if cell is None:
        answers = right.get(task.seed, {})
        cell = run(task.name, task.case, task.arm, TOOLS[task.tool], task.seed, folder, answers)
        keep(cell, folder)
    return cell


def run_all(
    chosen: Mapping[str, Case], tools: Sequence[str], seeds: int, folder: Path, console: Console
) -> list[Cell]:
    found: list[Cell] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    work = list(tasks(chosen, tools, seeds))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("cells", total=sum(len(a) + len(b) for a, b in work))
        for first, rest in work:
            right: dict[int, Mapping[str, Any]] = {}
            for part in (first, rest):
                with ThreadPoolExecutor(JOBS) as pool:
                    waiting = {pool.submit(done, task, folder, right): task for task in part}
                    for future in as_completed(waiting):
                        cell = future.result()
                        found.append(cell)
                        if part is first:
                            right[cell.seed] = cell.outputs
                        progress.update(bar, advance=1, description=cell.case)
    return found


def main() -> int:
    parser = _render.parser(__doc__ or "")
    known = cases()
    parser.add_argument("--case", nargs="+", choices=list(known), metavar="NAME",
                        help="only these cases (see --list)")  # fmt: skip
    parser.add_argument("--tool", nargs="+", choices=list(TOOLS), metavar="NAME",
                        help=f"only these tools: {', '.join(TOOLS)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="K",
                        help=f"how many seeds each cell has (default: {SEEDS})")  # fmt: skip
    parser.add_argument("--results", type=Path, metavar="FOLDER",
                        help="keep logs, dumps and results here, and go on from them")  # fmt: skip
    parser.add_argument("--write", action="store_true",
                        help="write docs/history.md, its picture and its reports")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the cases and do nothing")
    parser.add_argument("--releases", action="store_true",
                        help="list the releases that the cases need, and do nothing")  # fmt: skip
    args = parser.parse_args()
    console = Console(highlight=False)
    chosen = {n: c for n, c in known.items() if not args.case or n in args.case}
    if args.list:
        for name, case in known.items():
            _render.say(console, f"{name}: {case.title}", hang=4)
        return 0
    if args.releases:
        print("\n".join(table.releases(chosen)))
        return 0
    lost = missing(chosen)
    for release, names in sorted(lost.items()):
        _render.say(console, f"{', '.join(names)}: there is no environment with SGLang {release}, "
                    f"so it is not run. Make one with: make env SGLANG={release}")  # fmt: skip
    here = {n: c for n, c in chosen.items() if not any(n in names for names in lost.values())}
    on_cpu = {n: c for n, c in here.items() if not c.gpu}
    folder = args.results or Path(tempfile.mkdtemp(prefix="g4debug-history-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = run_all(on_cpu, args.tool or list(TOOLS), args.seeds, folder, console)
    rows = table.rows(known, found)
    for block in table.blocks(rows):
        _render.block(console, block)
    (folder / "history.json").write_text(json.dumps(table.as_json(rows)))
    _render.for_copying(console, "Logs, dumps and results are in:", str(folder))
    if args.write:
        for path in page.write(known, rows, folder):
            _render.for_copying(console, "Written:", str(path))
    return 0 if all(row.good for row in rows) and not lost else 1


if __name__ == "__main__":
    sys.exit(script(main))
