"""Looks for false findings on two ranks, in the modes in which servers with more GPUs run.

Each mode is a server of its own, with every tracer in ``raise`` mode, which stops at the first
finding. The requests are like those of soak.py: they differ in length, share prefixes, do not fit
into the pools together, and faults that break nothing abort and retract them and evict prefixes. In
the mode *contain* cells of page tables are broken and repaired on one rank only; the ranks must
stay in step. ``--device cuda`` needs two GPUs of the same kind.

A mode that the installed SGLang or the CPU engine cannot run is left out, and the reason is said.
The exit code is 0 if no mode has a false finding and every tracer has checked something on both
ranks, or has said why it does not. It is 1 if not, or if no mode ran, and 2 for wrong arguments.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import mixed, render
from harness.options import Parser, logs
from harness.processes import script
from rich.console import Console
from suites.ranks import Mode, Seen, judge, modes
from workloads.draft_embedding_shard import write_models

from g4debug import discovery

# On each rank short requests, many of them, in pools for a third of those that run.
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_running_requests": 8, "max_total_tokens": 1536},
    "cuda": {
        "max_running_requests": 32,
        "max_total_tokens": 10240,
        "cuda_graph_bs": [1, 4, 8, 16, 24, 32],  # each size takes seconds to capture
    },
}
REQUESTS = {"cpu": 40, "cuda": 2000}
TIMEOUT = 3600.0  # seconds of one mode


def serve(name: str, mode: Mode, device: str, count: int, folder: Path, console: Console) -> Seen:
    dumps = folder / f"{name}-dumps"
    shutil.rmtree(dumps, ignore_errors=True)
    environ = {
        "G4DEBUG_TRACE": ",".join(discovery.names("tracer")),
        "G4DEBUG_MODE": "contain" if mode.repaired else "raise",
        "G4DEBUG_LEAK_STEPS": "16",
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",  # this is the script that runs it there
        "G4DEBUG_FAULTS": mode.faults,
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps),
    }
    engine = {**ENGINE[device], **mode.engine}
    with console.status(name):
        run = mixed.run(name, environ, folder, TIMEOUT, count, engine, short=True, device=device)
    return judge(name, mode, run, dumps)


def markdown(found: Sequence[Seen], device: str) -> str:
    """A table: one row for each mode, with the checks of the rank that made fewest."""
    tracers = sorted({t for seen in found for t in seen.checked})
    head = ["mode", "what", "requests", "accept length", "result", *(f"`{t}`" for t in tracers)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for seen in found:
        checks = [f"{seen.checked[t]:,}" if t in seen.checked else "–" for t in tracers]
        result = "no false finding" if seen.good else f"**{seen.what}**"
        accept = f"{seen.accept_length:.2f}"
        cells = [f"`{seen.mode}`", seen.title, str(seen.requests), accept, result, *checks]
        lines.append(f"| {' | '.join(cells)} |")
    where = f"SGLang {version('sglang')}, torch {version('torch')}, {device}, two ranks."
    return f"{where}\n\n" + "\n".join(lines) + "\n"


def block(seen: Seen, folder: Path) -> render.Block:
    counted = ", ".join(f"{t} {n:,}" for t, n in seen.checked.items())
    said = " ".join(f"{t}: {why}." for t, why in seen.said.items())
    checks = f" Checks on each rank, at least: {counted}." if counted else ""
    what = f"{seen.what}{checks}{f' {said}' if said else ''}"
    log = folder / f"{seen.mode}.log"
    return render.Block(seen.mode, seen.good, what, seen.title, seen.seconds or None, log=log)


def main() -> int:
    parser = Parser(__doc__)
    known = modes()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", nargs="+", choices=list(known), metavar="MODE", help="only these (see --list)"
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help="how many each mode serves (cpu: 40, cuda: 2000)"
    )
    parser.out("write a Markdown table there")
    parser.results("keep logs, dumps and results here")
    parser.add_argument("--list", action="store_true", help="list the modes and do nothing")
    args = parser.parse_args()
    console = Console(highlight=False)
    if args.list:
        render.titles(console, known)
        return 0
    count = args.requests or REQUESTS[args.device]
    if args.device == "cuda":
        write_models()
    found: list[Seen] = []
    with logs("ranks", console, "Logs, dumps and results are in:", given=args.results) as kept:
        for name in args.only or known:
            mode = known[name]
            why = mode.not_here
            where = f"not run on SGLang {version('sglang')}"
            if not why and args.device == "cpu":
                why, where = mode.not_on_cpu, "not run on the CPU engine"
            if why:
                render.say(console, f"{name}: {where}: {why}.", hang=4)
                continue
            found.append(serve(name, mode, args.device, count, kept.folder, console))
            render.block(console, block(found[-1], kept.folder))
            if args.out:  # as they come: a run that is stopped keeps its rows
                args.out.write_text(markdown(found, args.device))
        kept.good = bool(found) and all(seen.good for seen in found)
    return kept.status


if __name__ == "__main__":
    raise SystemExit(script(main))
