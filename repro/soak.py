"""2,000 requests where nothing is wrong: no finding, and the tokens of a run without tracers.

Mixed lengths and shared prefixes in pools that are too small, with requests aborted, retracted
and prefixes evicted under way (faults that break nothing, drawn from one seed). The same
schedule runs twice on the CPU engine: without tracers, and with every tracer in ``raise`` mode,
which stops at the first finding. Exit code 0 only if both complete with the same tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from _run import HERE, Outcome, run_command, script
from rich.console import Console

from g4debug import discovery

STRESS = "seed=11;abort-request=4%on;forced-retract=4%on;radix-evict=5%on(512)"
# Short requests, many of them, in pools for a third of those that run.
ENGINE = {"max_running_requests": 12, "max_total_tokens": 1024}
SHAPE = {"longest": 160, "output": [2, 14]}
LIMIT = 3600.0


def run(name: str, armed: bool, count: int, folder: Path, console: Console) -> Outcome:
    env = {"G4DEBUG_FAULTS": STRESS}
    if armed:
        env |= {
            "G4DEBUG_TRACE": ",".join(discovery.names("tracer")),
            "G4DEBUG_LEAK_STEPS": "16",
            "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"),
        }
    result = folder / f"{name}.json"
    arm = str(HERE / "_mixed_arm.py")
    shapes = (json.dumps(ENGINE), json.dumps(SHAPE))
    command = [sys.executable, arm, str(result), str(count), "1", *shapes]
    with console.status(name):
        return run_command(name, command, result, env, folder, LIMIT)


def counts(text: str) -> str:
    """What really happened in a run, from its log."""
    aborted = text.count("abort-request #")
    retracted = sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", text))
    evicted = text.count("radix-evict #")
    cached = sum(int(n) for n in re.findall(r"#cached-token: (\d+)", text))
    return (
        f"{aborted} aborted, {retracted} retracted, {evicted} forced evictions, "
        f"{cached} prompt tokens from the prefix cache"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--keep", action="store_true", help="keep logs and dumps")
    args = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="g4debug-soak-"))
    good = False
    try:
        plain = run("plain", False, args.requests, folder, console)
        console.print(f"without tracers: {_line(plain)}", soft_wrap=True)
        armed = run("armed", True, args.requests, folder, console)
        console.print(f"with every tracer: {_line(armed)}", soft_wrap=True)
        findings = sorted((folder / "dumps").glob("*.pt"))
        same = (
            plain.completed
            and armed.completed
            and (plain.result["outputs"] == armed.result["outputs"])
        )
        good = same and not findings
        console.print(
            f"{len(findings)} findings; tokens {'identical' if same else 'NOT identical'}",
            style="green" if good else "red",
        )
        if not good or args.keep:
            console.print(f"logs and dumps: {folder}", soft_wrap=True)
        return 0 if good else 1
    finally:
        if good and not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _line(run: Outcome) -> str:
    if not run.completed:
        return f"did not complete (status {run.status})"
    outputs = run.result["outputs"]
    tokens = sum(len(o["tokens"]) for o in outputs.values())
    return (
        f"{len(outputs)} requests, {tokens} tokens in {run.result['s']:.0f} s; {counts(run.text)}"
    )


if __name__ == "__main__":
    sys.exit(script(main))
