"""Draws healthy servers at random, and looks for false findings.

    python repro/fuzz.py [--first SEED] [--servers N] [--results FOLDER]

Each server is real SGLang on the CPU engine: page size, pools, chunks, backends, draft, scheduling
and traffic are drawn by its seed, so a seed is enough to have the same server again. Every tracer
is armed in mode ``raise``, which stops at the first finding. Where an armed server does not do
all that it was asked for, the same one runs without tracers: if that one does not either, it is
SGLang's own; if it does, a tracer is to blame until somebody has looked.

The exit code is 0 if nothing is to blame on a tracer, 1 if something is, and 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import _fuzz
import _render
from _healthy_run import FAILED, RECORDS, checked_of, forget, headline, tracing
from _render import Block
from _run import HERE, UP, Outcome, run_command, script
from _variants import not_completed
from rich.console import Console

SERVERS = 20
ALWAYS = ("page-table", "pool-leak", "swa-allocator")  # they have something to check on any server
TIMEOUT = 400.0  # seconds of one server


def main() -> int:
    parser = _render.parser(__doc__ or "")
    parser.add_argument("--first", type=int, default=1, metavar="SEED",
                        help="the seed of the first server (default: 1)")  # fmt: skip
    parser.add_argument("--servers", type=_positive, default=SERVERS, metavar="N",
                        help=f"how many servers (default: {SERVERS})")  # fmt: skip
    parser.add_argument("--results", type=Path, metavar="FOLDER",
                        help="keep logs and dumps here")  # fmt: skip
    args = parser.parse_args()
    console = Console(highlight=False)
    folder = args.results or Path(tempfile.mkdtemp(prefix="g4debug-fuzz-"))
    bad = 0
    for seed in range(args.first, args.first + args.servers):
        told = one(seed, folder / str(seed))
        _render.block(console, told)
        bad += not told.good
    if bad or args.results:
        _render.for_copying(console, "Logs and dumps are in:", str(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


def one(seed: int, folder: Path) -> Block:
    """Run the server of a seed, armed, and without tracers if that one did not do all."""
    shape = _fuzz.draw(seed)
    armed = start(seed, True, folder)
    problem = trouble(armed, folder)
    if not problem:
        requests, checks = (
            armed.result["requests"],
            sum(checked_of(armed.result["checked"]).values()),
        )
        text = f"{requests} requests, {checks} checks, no finding."
        return Block(str(seed), True, text, title=shape.words, seconds=armed.seconds)
    bare = start(seed, False, folder)
    return Block(str(seed), *blame(problem, armed, bare), title=shape.words, seconds=armed.seconds)


def start(seed: int, armed: bool, folder: Path) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    name = "armed" if armed else "plain"
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    forget(folder)
    command = [sys.executable, str(HERE / "_fuzz_variant.py"), str(seed), str(result)]
    environ = tracing(folder) if armed else {}
    return run_command(name, command, result, environ, folder, TIMEOUT)


def trouble(armed: Outcome, folder: Path) -> str:
    """What an armed server did that it should not; '' if all is well."""
    failed = FAILED.search(armed.text)
    if failed is not None:
        return f"g4debug failed: {failed[0]}"
    if not armed.completed:
        dumped = any((folder / "dumps").glob("*.pt"))
        return f"a finding: {headline(armed.text)}" if dumped else not_completed(armed)
    if any((folder / "dumps").glob("*.pt")):
        return f"a finding: {headline(armed.text)}"
    checked = checked_of(armed.result["checked"])
    idle = [t for t in ALWAYS if not checked.get(t)]
    return f"checked nothing: {', '.join(idle)}" if idle else ""


def blame(problem: str, armed: Outcome, bare: Outcome) -> tuple[bool, str]:
    """Whether no tracer is to blame, and what happened.

    What the flight recorder keeps accuses nobody: it is how SGLang itself ended, or stands.
    """
    if problem.startswith("a finding: ") and RECORDS not in problem:
        return False, f"{problem}. It is false, or it is a bug of SGLang's: look at the dump."
    if bare.completed:
        return False, f"{problem}. Without tracers it completes."
    alike = (UP in armed.text) == (UP in bare.text)
    how = not_completed(bare)
    if not alike:
        return False, f"{problem}. Without tracers it comes further: {how}"
    return True, f"SGLang's own: {how} With tracers: {problem}."


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(script(main))
