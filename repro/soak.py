"""Looks for false findings: 2,000 requests in which nothing is wrong.

    python repro/soak.py [--requests N] [--keep]

The requests differ in length, share prefixes, and do not fit into the KV pools at the same time.
Faults that break nothing abort and retract requests and evict prefixes on the way, drawn from one
seed. The same schedule runs twice on the CPU engine: without tracers, and with every tracer in
``raise`` mode, which stops at the first finding.

The exit code is 0 if both runs complete with the same tokens and without a finding, 1 if not, and 2
for wrong arguments.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import _render
from _run import HERE, Outcome, run_command, script
from _variants import not_completed
from rich.console import Console

from g4debug import discovery

STRESS = "seed=11;abort-request=4%on;forced-retract=4%on;radix-evict=5%on(512)"
# Short requests, many of them, in pools for a third of those that run.
ENGINE = {"max_running_requests": 12, "max_total_tokens": 1024}
SHAPE = {"longest": 160, "output": [2, 14]}
TIMEOUT = 3600.0  # seconds of one run


def run(name: str, armed: bool, count: int, folder: Path, console: Console) -> Outcome:
    env = {"G4DEBUG_FAULTS": STRESS}
    if armed:
        env |= {
            "G4DEBUG_TRACE": ",".join(discovery.names("tracer")),
            "G4DEBUG_LEAK_STEPS": "16",
            "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
        }
    result = folder / f"{name}.json"
    program = str(HERE / "_mixed_variant.py")
    shapes = (json.dumps(ENGINE), json.dumps(SHAPE))
    command = [sys.executable, program, str(result), str(count), "1", *shapes]
    with console.status(name):
        return run_command(name, command, result, env, folder, TIMEOUT)


def counts(text: str) -> str:
    """What really happened in a run, from its log."""
    aborted = text.count("abort-request #")
    retracted = sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", text))
    evicted = text.count("radix-evict #")
    cached = sum(int(n) for n in re.findall(r"#cached-token: (\d+)", text))
    return (
        f"Aborts: {aborted}. Retractions: {retracted}. Forced evictions: {evicted}. "
        f"Prompt tokens that came from the prefix cache: {cached}."
    )


def main() -> int:
    parser = _render.parser(__doc__ or "")
    parser.add_argument(
        "--requests",
        type=int,
        default=2000,
        metavar="N",
        help="how many requests each run serves (default: 2000)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the logs and dumps and say where they are"
    )
    args = parser.parse_args()
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="g4debug-soak-"))
    good = False
    try:
        plain = run("plain", False, args.requests, folder, console)
        _render.say(console, f"Without tracers: {_line(plain)}", hang=4)
        armed = run("armed", True, args.requests, folder, console)
        _render.say(console, f"With every tracer: {_line(armed)}", hang=4)
        findings = sorted((folder / "dumps").glob("*.pt"))
        same = (
            plain.completed
            and armed.completed
            and (plain.result["outputs"] == armed.result["outputs"])
        )
        good = same and not findings
        tokens = "the same" if same else "NOT the same"
        _render.say(
            console,
            f"There were {len(findings)} findings. The tokens of both runs are {tokens}.",
            style="green" if good else "red",
        )
        if not good or args.keep:
            _render.for_copying(console, "The logs and dumps are kept in:", str(folder))
        return 0 if good else 1
    finally:
        if good and not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _line(run: Outcome) -> str:
    if not run.completed:
        return not_completed(run)
    outputs = run.result["outputs"]
    tokens = sum(len(o["tokens"]) for o in outputs.values())
    seconds = run.result["s"]
    return f"{len(outputs)} requests got {tokens} tokens in {seconds:.0f} s. {counts(run.text)}"


if __name__ == "__main__":
    sys.exit(script(main))
