"""Drives healthy servers with what production does, and looks for false findings.

Each group of workloads runs on an engine of its own: real SGLang on the CPU engine, once without
tracers and once with every tracer in ``raise`` mode, which stops at the first finding. The last one
is a real ``launch_server`` under HTTP load. From the tape of the engine with tracers its scheduler
then decides again, by ``g4debug replay``. The page docs/healthy-RELEASE.md is written from the
results.

The exit code is 0 if there is no finding, the tokens are the same, every feature really came into
play, every tracer really checked something, and all steps of the replay are equal or the tape says
what it cannot carry. It is 1 if not, and 2 for wrong arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from harness import render
from harness.options import Parser, logs, page, results_of
from harness.options import left_out as not_there
from harness.processes import script
from rich.console import Console
from suites.healthy.groups import groups, left_out
from suites.healthy.run import Ran, Served, judge, keep, kept, refused, replay, serve, start
from suites.healthy.table import block, markdown, served_block
from suites.healthy.workload import Group

DOCS = Path(__file__).resolve().parent.parent / "docs"
SERVER = "server"


def run(group: Group, folder: Path, compare: bool = True) -> Ran:
    """Both engines of a group at the same time: one alone keeps one core busy.

    compare: False for the armed one alone.
    """
    if group.refused:
        return refused(group, start(group, False, folder))
    compared = compare and any(w.compare for w in group.workloads)
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(start, group, False, folder) if compared else None
        armed = pool.submit(start, group, True, folder)
        ran = judge(group, plain.result() if plain else None, armed.result(), folder)
    if ran.good:
        replay(ran, folder)
    return ran


def serve_or_kept(minutes: float, folder: Path, model: str) -> Served:
    path = folder / "server.result"
    if path.is_file():
        found = Served(**json.loads(path.read_text()))
        if not found.problem and found.minutes >= minutes:
            return found
    served = serve(minutes, folder / SERVER, model)
    path.write_text(json.dumps(asdict(served)))
    return served


def chosen(
    known: Mapping[str, Group], wanted: Sequence[str] | None, armed_only: bool = False
) -> list[str]:
    """The ids of the groups that run: those on the command line, or all but the short subset.

    armed_only: without the server, of which nothing is compared or replayed.
    """
    if wanted:
        return [name for name in (*known, SERVER) if name in wanted]
    groups = [name for name, group in known.items() if not group.short]
    return groups if armed_only else [*groups, SERVER]


def main() -> int:
    parser = Parser(__doc__)
    parser.model()
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="GROUP",
        help="only these groups (see --list). No page is written then, unless --out is given",
    )
    parser.number("--minutes", "how long the server is under load", 10, "M", float)
    parser.out("where the page is written (default: docs/healthy-RELEASE.md, or -MODEL.md)")
    parser.results(
        "keep logs, dumps and results here. A group that has a good result there is not run again"
    )
    parser.add_argument(
        "--armed-only",
        action="store_true",
        help="run only the engines with tracers, and replay their tapes: no tokens are compared, "
        "and no page is written",
    )
    parser.add_argument("--list", action="store_true", help="list the groups and do nothing")
    args = parser.parse_args()
    if args.armed_only and args.out:
        parser.error("--armed-only: expected no --out, since a page says what was compared")
    console = Console(highlight=False)
    known, missing = groups(args.model), left_out(args.model)
    for name in args.only or ():
        if name not in (*known, SERVER):
            why = missing.get(name, f"there are: {', '.join((*known, SERVER))}")
            parser.error(f"{args.model} has no group {name!r}: {why}")
    if args.list:
        render.titles(console, known)
        not_there(console, missing, args.model)
        render.say(console, f"{SERVER}: launch_server under HTTP load")
        return 0
    not_there(console, missing, args.model)
    runs: list[Ran] = []
    served: Served | None = None
    with logs("healthy", console, "Logs, dumps and results are in:", given=args.results) as left:
        folder = results_of(left.folder, args.model)
        for name in chosen(known, args.only, args.armed_only):
            if name == SERVER:
                served = serve_or_kept(args.minutes, folder, args.model)
                render.block(console, served_block(served))
                continue
            group, path = known[name], folder / f"{name}.result"
            ran = kept(group, path)
            if args.armed_only:
                path = folder / f"{name}.armed.result"
                ran = ran or kept(group, path)
            if ran is None:
                ran = run(group, folder / name, not args.armed_only)
                keep(ran, path)
            runs.append(ran)
            render.block(console, block(ran))
        left.good = all(r.good for r in runs) and (served is None or not served.problem)
        if args.out or not (args.only or args.armed_only):
            out = args.out or page(DOCS, "healthy", args.model)
            done = {r.group.id for r in runs}
            rest = [name for name, group in known.items() if not group.short and name not in done]
            out.write_text(markdown(runs, served, args.model, missing, rest))
            render.for_copying(console, "The page is in:", str(out))
    return left.status


if __name__ == "__main__":
    raise SystemExit(script(main))
