"""What the repro scripts share: arms, the judge's verdict, the table, the command line."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _run import Outcome, Stopped, listen, run_arm
from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4debug.dumps import file, reading
from g4debug.findings.record import TrapRecord
from g4debug.settings import DEFAULT_DUMP_DIR

DEBUG = {"SGLANG_TRTLLM_MHA_DEBUG": "1"}


@dataclass(frozen=True)
class Verdict:
    good: bool
    what: str  # one line for the table


@dataclass(frozen=True)
class Arm:
    """``judge(run, clean)``: the arm's own outcome, and the clean arm's if it ran before.

    workload: ``MODULE`` or ``MODULE:NAME`` of this folder, see :mod:`_arm`. explain: what of a
    run the user would have seen: "traceback", "finding" or nothing.
    """

    title: str
    environment: Mapping[str, str]
    judge: Callable[[Outcome, Outcome | None], Verdict]
    workload: str = "_workload"
    explain: str = ""


@dataclass(frozen=True)
class Repro:
    """A script: its title, its arms in order; ``clean`` is the one that others compare with.

    elsewhere: what to say on a device that is not in ``devices``.
    """

    title: str
    arms: Mapping[str, Arm]
    devices: Mapping[str, Callable[[int | None], Any]]
    compares: tuple[str, ...] = ()  # arms that are judged by the clean arm's tokens
    elsewhere: str = ""


def not_comparable(run: Outcome, clean: Outcome | None) -> str:
    """Why nothing can be said of this run beside the clean one; empty: it can."""
    if not run.completed:
        return f"did not complete (status {run.status}); log: {run.log}"
    if clean is None or not clean.completed:
        return "completes, but there is no clean run to compare with"
    return ""


def same_outputs(run: Outcome, clean: Outcome | None) -> Verdict:
    """Completed, and every output equals the clean arm's, token by token."""
    reason = not_comparable(run, clean)
    if reason or clean is None:
        return Verdict(False, reason)
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    if same < len(pairs):
        return Verdict(False, f"only {same} of {len(pairs)} outputs equal the clean arm's")
    return Verdict(
        True,
        f"completes; all {same} outputs equal the clean arm's, "
        f"accept length {run.result['accept_length']:.2f}",
    )


def blamed(run: Outcome) -> str:
    """The innermost SGLang function that the broken arm's traceback points at."""
    frames = [line for line in run.text.splitlines() if line.startswith('  File "')]
    for line in reversed(frames):
        path, _, function = line.partition(", line")
        if "sglang" in path:
            return f"{Path(path.split(chr(34))[1]).name} {function.rpartition(' in ')[2]}"
    return "no SGLang function at all"


def headline_first(run: Outcome, headline: str) -> bool:
    text = run.text
    other = text.find("Scheduler hit an exception")
    return 0 <= text.find(headline) < (other if other >= 0 else len(text))


def dump_path(run: Outcome) -> Path | None:
    """The dump that the arm's log names."""
    for line in run.text.splitlines():
        if line.strip().startswith("dump:"):
            return Path(line.split("dump:", 1)[1].strip())
    return None


def dump_of(run: Outcome) -> TrapRecord | None:
    path = dump_path(run)
    if path is None:
        return None
    try:
        return reading.read(path)
    except file.DumpError:
        return None


def viewer() -> str:
    """How to call g4debug from here: by name if it is on PATH, else by its place."""
    script = Path(sys.executable).with_name("g4debug")
    if shutil.which("g4debug") or not script.exists():
        return "g4debug"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


def run_all(
    repro: Repro,
    names: list[str],
    device: str,
    requests: int,
    limit: float,
    folder: Path,
    console: Console,
) -> dict[str, tuple[Outcome, Verdict]]:
    done: dict[str, tuple[Outcome, Verdict]] = {}
    for number, name in enumerate(names, 1):
        arm = repro.arms[name]
        label = f"[{number}/{len(names)}] {name}: {arm.title}"
        environment = dict(arm.environment)
        if DEBUG.items() <= environment.items():
            environment["SGLANG_TRTLLM_MHA_DEBUG_DIR"] = str(DEFAULT_DUMP_DIR)
        status = console.status(label) if console.is_terminal else nullcontext()
        with status as spinner:

            def progress(text: str, label: str = label, spinner: Any = spinner) -> None:
                if spinner is not None:
                    spinner.update(f"{label} … {text}")

            if not console.is_terminal:
                console.print(Text(f"{label} …"), soft_wrap=True)
            run = run_arm(
                name, device, requests, environment, folder, limit, progress, arm.workload
            )
        verdict = arm.judge(run, done["clean"][0] if "clean" in done else None)
        done[name] = (run, verdict)
        mark = Text("ok ", "green") if verdict.good else Text("BAD ", "bold red")
        console.print(
            Text(f"[{number}/{len(names)}] {name} ")
            .append_text(mark)
            .append(f"{run.seconds:.0f} s: {verdict.what}"),
            soft_wrap=True,
        )
        explain(arm, run, console)
    return done


def explain(arm: Arm, run: Outcome, console: Console) -> None:
    """What the user would have seen of this arm."""
    if arm.explain == "traceback":
        for line in run.traceback():
            console.print(Text(f"    {line}", "dim"), soft_wrap=True)
    elif arm.explain == "finding":
        record, path = dump_of(run), dump_path(run)
        if record is not None:
            console.print(Text(f"    {record.finding.headline}", "bold"), soft_wrap=True)
            console.print(
                Text(f"    dump: {path}\n    next: {viewer()} show {path}"), soft_wrap=True
            )


def summary(repro: Repro, done: dict[str, tuple[Outcome, Verdict]]) -> Table:
    table = Table(title=repro.title)
    for column in ("arm", "switches", "as it should", "what happened", "s"):
        table.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
    for name, (run, verdict) in done.items():
        switches = " ".join(f"{k}={v}" for k, v in repro.arms[name].environment.items())
        table.add_row(
            name,
            switches or "none",
            "yes" if verdict.good else "NO",
            verdict.what,
            f"{run.seconds:.0f}",
        )
    return table


def as_json(repro: Repro, device: str, done: dict[str, tuple[Outcome, Verdict]]) -> dict[str, Any]:
    arms = {
        name: {
            "good": verdict.good,
            "what": verdict.what,
            "status": run.status,
            "seconds": round(run.seconds, 2),
            "swa_peak": run.swa_peak,
            "dump": str(dump_path(run)) if repro.arms[name].explain == "finding" else None,
            **{k: v for k, v in run.result.items() if k != "tokens"},
        }
        for name, (run, verdict) in done.items()
    }
    return {"device": device, "arms": arms, "good": all(a["good"] for a in arms.values())}


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def arguments(repro: Repro, doc: str, requests: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--arm", action="append", choices=list(repro.arms), help="only this; repeatable"
    )
    parser.add_argument("--requests", type=int, default=0, help=f"default: {requests}")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument("--keep", action="store_true", help="keep the arms' logs and say where")
    return parser.parse_args()


def main(repro: Repro, doc: str, requests: str) -> int:
    """Run the arms that were asked for. 0: all did as they should, 1: one did not,
    2: not on this device, 128 and its number: a signal, Ctrl-C is 130.
    """
    args = arguments(repro, doc, requests)
    listen()
    console = Console(stderr=args.json, highlight=False)
    device = args.device or default_device()
    if device not in repro.devices:
        console.print(Text(repro.elsewhere), soft_wrap=True)
        return 2
    names = [n for n in repro.arms if not args.arm or n in args.arm]
    if "clean" not in names and set(names) & set(repro.compares):
        names.insert(0, "clean")
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    good = False
    try:
        limit = repro.devices[device](args.requests or None).limit
        done = run_all(repro, names, device, args.requests, limit, folder, console)
        good = all(verdict.good for _, verdict in done.values())
        console.print(summary(repro, done))
        if args.json:
            print(json.dumps(as_json(repro, device, done), indent=2))
    except Stopped as stopped:
        console.print("stopped; no process of ours is left")
        return stopped.status
    finally:
        if args.keep or not good:
            console.print(Text(f"logs: {folder}"), soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1
