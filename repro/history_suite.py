"""Runs SGLang's own bugs against every tool, and writes the table of who noticed what.

Each case is a real bug of SGLang, in a release that has it or put back, with a workload and a
ground truth that knows nothing of the tools. Each cell of the table is real SGLang on the CPU
engine, in a process of its own: a case, one of its arms (with the bug, without it), a tool and a
seed. A cell that has a result in FOLDER is not run again, and with ``--published`` none that is in
docs/history/cells.jsonl.

Each natural case also runs on every release that there is an environment for, without a tool, which
says which release has which bug.

With ``--replay`` it runs no cell. For each case it replays a dump of the run with the bug, on a
CPU, and says in how many the same came again: docs/history/replays.jsonl. Dumps from a GPU are made
there with ``--record``, and replayed elsewhere with ``--replay --device cuda``, from the same
FOLDER. With ``--tool watch`` the runs had no more than SGLANG_TRTLLM_MHA_DEBUG=watch, and every
tracer looks at the replay.

With ``--model`` another model than Gemma-4 is served, in the cases that it can have.

With ``--device cuda`` it runs what no CPU can: the cases that need a GPU, and for all others the
tools that do, beside a run without any tool.

The exit code is 0 if every cell that ran is valid and no tool of ours accused a healthy arm, 1 if
not, or if the machine ended a cell and not its bug, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import render
from harness.options import Parser, left_out
from harness.processes import go_on, script
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from suites.history import across, gpu, page, replays, table
from suites.history.case import CPU, CUDA, Case
from suites.history.cases import cases
from suites.history.cell import (
    ABSENT,
    ARMS,
    BUGGY,
    FIXED,
    PYTHONS,
    RIGHT,
    SPOILED,
    Cell,
    arm_of,
    as_text,
    compared,
    from_text,
    interpreter,
    keep,
    kept,
    run,
)
from suites.history.replays import Replay
from suites.history.tools import NOTHING, TOOLS, device_of

from g4debug.cpu import toys
from g4debug.cpu.server import DEFAULT

SEEDS = 5
JOBS = 2  # an engine keeps one core busy


def reference(case: Case) -> str:
    """The arm that gives the right answers if it runs without a tool."""
    return FIXED if case.right is None else RIGHT


def tasks(
    chosen: Mapping[str, Case],
    tools: Sequence[str],
    seeds: int,
    device: str = CPU,
    model: str = DEFAULT,
) -> tuple[list[Cell], list[Cell]]:
    """The runs that give the right answers, and the runs that are compared with them."""
    first, rest = [], []
    for name, case in chosen.items():
        mine = [t for t in tools if t != NOTHING and device_of(case, t) == device]
        if not mine and not (NOTHING in tools and device_of(case, NOTHING) == device):
            continue
        right = reference(case)
        first += [Cell(name, right, NOTHING, s, device=device, model=model) for s in range(seeds)]
        rest += [
            Cell(name, arm, tool, seed, device=device, model=model)
            for tool in (NOTHING, *mine)
            for seed in range(seeds)
            for arm in (BUGGY, FIXED)
        ]
    known = {t.id for t in first}
    return first, [t for t in rest if t.id not in known]


def across_tasks(chosen: Mapping[str, Case], tools: Sequence[str], seeds: int) -> list[Cell]:
    """Each case on each release that has an environment: see ``suites.history.across``."""
    if NOTHING not in tools:
        return []
    there = [r for r in across.releases() if interpreter(r).exists()]
    return [
        Cell(name, release, NOTHING, seed)
        for name in across.asked(chosen)
        for release in there
        for seed in range(min(seeds, across.SEEDS))
    ]


def missing(chosen: Mapping[str, Case]) -> dict[str, list[str]]:
    """release -> the cases that need an environment of it, which is not there."""
    found: dict[str, list[str]] = {}
    for name, case in chosen.items():
        for release in {arm_of(case, arm).release for arm in (BUGGY, FIXED, RIGHT)}:
            if not interpreter(release).exists():
                found.setdefault(release, []).append(name)
    return found


def done(
    task: Cell,
    folder: Path,
    right: Mapping[int, Mapping[str, Any]],
    published: Mapping[str, Cell],
) -> Cell:
    """The result of a blank cell, which is run if there is none yet. right: seed -> answers."""
    cell = kept(task.id, folder) or published.get(task.id)
    if cell is not None:
        return cell
    with alone(folder / task.id):
        cell = kept(task.id, folder)
        if cell is None:
            # Another release's answers are not asked to be the same.
            cell = run(task, folder, right.get(task.seed, {}) if task.arm in ARMS else {})
            if cell.said != ABSENT and cell.ended != SPOILED:
                keep(cell, folder)
    return cell


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other run of the suite has the cell of this folder meanwhile. Raises Stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                go_on()
                time.sleep(0.2)
        yield


def run_all(
    work: tuple[Sequence[Cell], Sequence[Cell]],
    jobs: int,
    folder: Path,
    console: Console,
    published: Mapping[str, Cell],
) -> list[Cell]:
    """All cells of ``tasks``, ``jobs`` at a time. Cells that have a result are read.

    Where the machine ended the run that gives the right answers, nothing is compared with it: what
    would be has to wait for the next time.
    """
    found: list[Cell] = []
    right: dict[str, dict[int, Mapping[str, Any]]] = {}  # case -> seed -> answers
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("cells", total=sum(map(len, work)))
        for part in work:
            with ThreadPoolExecutor(jobs) as pool:
                spoiled = {(c.case, c.seed) for c in found if c.ended == SPOILED}
                waiting = [
                    pool.submit(done, t, folder, right.get(t.case, {}), published)
                    for t in part
                    if t.arm not in ARMS or (t.case, t.seed) not in spoiled
                ]
                for future in as_completed(waiting):
                    cell = future.result()
                    found.append(cell)
                    progress.update(bar, advance=1, description=cell.case)
            if part is work[0]:
                for cell in found:
                    if cell.ended != SPOILED:
                        right.setdefault(cell.case, {})[cell.seed] = cell.outputs
    return found


def known_replays() -> list[Replay]:
    return replays.from_text(page.REPLAYS.read_text()) if page.REPLAYS.is_file() else []


def record_all(
    chosen: Mapping[str, Case], seeds: int, jobs: int, folder: Path, console: Console
) -> int:
    """Keep the run of each case with its bug, on a GPU. Returns the exit code."""
    folder = folder / "replays"
    folder.mkdir(parents=True, exist_ok=True)
    # Seed by seed: the first one of each case compiles kernels for those that come later.
    work = [(name, seed) for seed in range(seeds) for name in chosen]
    lost = 0
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(replays.recorded, *of, folder, CUDA): of for of in work}
        for future in as_completed(waiting):
            (name, seed), ran = waiting[future], future.result()
            kept = ran is not None and replays.dump_of(folder / ran.id) is not None
            lost += not kept
            what = f"{ran.ended}, {ran.grade}. {ran.said}" if ran else "g4debug refuses this SGLang"
            render.say(console, f"{name}, seed {seed}: {'' if kept else 'NO DUMP. '}{what}", hang=4)
    return 1 if lost else 0


def replay_all(
    chosen: Mapping[str, Case],
    seeds: int,
    folder: Path,
    console: Console,
    device: str,
    watch: bool = False,
) -> list[Replay]:
    """The replays of these cases, one at a time, and the known ones of all others."""
    found = {r.key: r for r in known_replays()}
    folder = folder / "replays"
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in chosen.items():
        for seed in range(0 if case.gpu and device == CPU else seeds):
            new = replays.run(name, seed, folder, device, watch)
            if new is not None:
                found[new.key] = new
                render.say(console, f"{name}, seed {seed}: {new.word}. {new.said}", hang=4)
            else:
                render.say(console, f"{name}, seed {seed}: there is no run to replay")
    return list(found.values())


def elsewhere(folder: Path, device: str, model: str = DEFAULT) -> dict[str, Cell]:
    """The results in ``folder`` of another device, release or model, for the same page."""
    cells = [kept(path.stem, folder) for path in sorted(folder.glob("*.*.*.*.json"))]
    here = (device, model)
    return {c.id: c for c in cells if c and ((c.device, c.model) != here or c.arm not in ARMS)}


def answers(cells: Iterable[Cell], known: Mapping[str, Case]) -> set[str]:
    """The ids of the cells that have the right answers."""
    return {c.id for c in cells if c.tool == NOTHING and c.arm == reference(known[c.case])}


def with_right_answers(cells: Mapping[str, Cell], known: Mapping[str, Case]) -> dict[str, Cell]:
    """Compares cells that ran before the run with the right answers did, if their answers are
    kept."""
    every = dict(cells)
    for name, cell in cells.items():
        if cell.arm not in ARMS:
            continue
        arm = reference(known[cell.case])
        right = cells.get(replace(cell, arm=arm, tool=NOTHING).id)
        if cell.wrong < 0 and cell.outputs and right and right.outputs and right is not cell:
            every[name] = compared(cell, right.outputs)
    return every


def named(text: str) -> tuple[str, Path]:
    """``RELEASE=PATH`` of --python."""
    release, equals, path = text.partition("=")
    if not equals or not Path(path).exists():
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected RELEASE=PATH, a release of SGLang and a Python that has it"
        )
    return release, Path(path)


def main() -> int:
    parser = Parser(__doc__)
    known = cases()
    parser.add_argument("--case", nargs="+", choices=list(known), metavar="NAME",
                        help="only these cases (see --list)")  # fmt: skip
    parser.add_argument("--tool", nargs="+", choices=list(TOOLS), metavar="NAME",
                        help=f"only these tools: {', '.join(TOOLS)}")  # fmt: skip
    parser.model()
    parser.number("--seeds", "how many seeds each cell has", SEEDS, "K")
    parser.results("keep logs, dumps and results here, and go on from them")
    parser.add_argument("--device", choices=(CPU, CUDA), default=CPU,
                        help="where the engines run (default: cpu)")  # fmt: skip
    parser.number("--jobs", "how many cells run at a time", JOBS)
    parser.add_argument("--python", type=named, nargs="+", default=[], metavar="RELEASE=PATH",
                        help="the Python that has a release of SGLang, if it is not in "
                        ".venv-RELEASE")  # fmt: skip
    parser.add_argument("--replay", action="store_true",
                        help="replay a dump of each case, in place of the cells")  # fmt: skip
    parser.add_argument("--record", action="store_true",
                        help="on a GPU, keep a dump of each case for a later --replay")  # fmt: skip
    parser.add_argument("--published", action="store_true",
                        help="go on from the results in docs/history/cells.jsonl")  # fmt: skip
    parser.add_argument("--write", action="store_true",
                        help="write docs/history.md, its picture and its reports")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the cases and do nothing")
    parser.add_argument("--releases", action="store_true",
                        help="list the releases that the cases need, and do nothing")  # fmt: skip
    args = parser.parse_args()
    console = Console(highlight=False)
    chosen = {n: c for n, c in known.items() if not args.case or n in args.case}
    toy, on_gemma = toys.load(args.model), args.model == DEFAULT
    if not on_gemma and (args.device == CUDA or args.replay):
        parser.error(f"--model {args.model}: expected neither --device cuda nor --replay with it")
    without = {n: why for n, c in chosen.items() if (why := c.without(toy))}
    left_out(console, without, args.model)
    chosen = {n: c for n, c in chosen.items() if n not in without}
    if args.list:
        render.titles(console, known)
        return 0
    if args.releases:
        print("\n".join(table.releases(chosen)))
        return 0
    PYTHONS.update(args.python)
    watch = args.tool == [*replays.WATCH]
    if args.replay and args.tool and not watch:
        parser.error("--replay: expected no --tool, or --tool watch alone")
    if args.record and (args.replay or args.device != CUDA):
        parser.error("--record: expected --device cuda, and no --replay with it")
    if args.device == CUDA and not args.replay:
        try:
            gpu.names()
        except RuntimeError as e:
            parser.error(str(e))
    folder = args.results or Path(tempfile.mkdtemp(prefix="g4debug-history-"))
    folder.mkdir(parents=True, exist_ok=True)
    if args.record:
        return record_all(chosen, args.seeds, args.jobs, folder, console)
    first, rest = tasks({} if args.replay else chosen, args.tool or list(TOOLS), args.seeds,
                        args.device, args.model)  # fmt: skip
    lost = missing({t.case: known[t.case] for t in first}) if args.device == CPU else {}
    for release, names in sorted(lost.items()):
        render.say(console, f"{', '.join(names)}: there is no environment with SGLang {release}, "
                    f"so it is not run. Make one with: make env SGLANG={release}")  # fmt: skip
    away = {n for names in lost.values() for n in names}
    here = ([t for t in first if t.case not in away], [t for t in rest if t.case not in away])
    if args.device == CPU and not args.replay and on_gemma:
        here[1].extend(across_tasks(chosen, args.tool or list(TOOLS), args.seeds))
    on_page = from_text(page.CELLS.read_text()) if page.CELLS.is_file() else {}
    published = on_page if args.published or args.replay else {}
    replayed = (
        replay_all(chosen, args.seeds, folder, console, args.device, watch)
        if args.replay
        else known_replays()
    )
    found = run_all(here, args.jobs, folder, console, published)
    spoiled = [c for c in found if c.ended == SPOILED]
    absent = sorted({c.case for c in found if c.said == ABSENT})
    if absent:  # on a GPU, where nobody knows of an environment before a cell asks for it
        render.say(console, f"{', '.join(absent)}: not run in full, because a release of SGLang "
                   "that is needed is not here. --python RELEASE=PATH names one")  # fmt: skip
    cells = {c.id: c for c in found if c.ended != SPOILED}
    others = {name: c for name, c in on_page.items() if c.model != args.model}  # they stay there
    cells = {**others, **published, **elsewhere(folder, args.device, args.model), **cells}
    cells = with_right_answers(cells, known)
    by_model = table.by_model(known, cells.values(), replayed)
    rows = by_model.get(args.model, [])
    for block in table.blocks(rows):
        render.block(console, block)
    (folder / "history.json").write_text(json.dumps(table.as_json(rows)))
    render.for_copying(console, "Logs, dumps and results are in:", str(folder))
    if args.write:
        text = as_text(cells.values(), answers(cells.values(), known))
        releases = across.answers(known, cells.values())
        for path in page.write(known, by_model, folder, text, releases):
            render.for_copying(console, "Written:", str(path))
    if spoiled:
        one = spoiled[0]
        render.say(
            console,
            f"{len(spoiled)} cells prove nothing, because the machine ended them and not their "
            "bug, or because their ground truth does not fit this SGLang. The first is "
            f"{one.id}: {one.said}. Where they give the right answers, the cells that are compared "
            "with them did not run either. To run them again, give the same command the same "
            "--results, and perhaps fewer --jobs.",
        )
    complete = not lost and not spoiled and not absent
    return 0 if complete and all(row.good for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(script(main))
