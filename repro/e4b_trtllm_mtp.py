"""Gemma-4 E4B + trtllm_mha + FROZEN_KV_MTP: clean, broken, diagnosed, fixed, on real SGLang.

    python repro/e4b_trtllm_mtp.py [--device cpu|cuda] [--arm NAME] [--requests N] [--json] [--keep]

Exit code 0 only if every arm did as it should, 1 if one did not, 2 for wrong arguments.
"""

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

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parent))
from _run import Outcome, run_arm
from _workload import DEVICES, Workload

from g4debug import dump
from g4debug.record import TrapRecord
from g4debug.settings import DEFAULT_DUMP_DIR

FAULT = {"G4DEBUG_FAULTS": "seed=7;stale-swa-state=on"}
FIX_OFF = {"G4DEBUG_FIX_SWA_STATE_SWAP": "0"}
DEBUG = {"SGLANG_TRTLLM_MHA_DEBUG": "1"}
SWA_GOAL = 0.85


@dataclass(frozen=True)
class Verdict:
    good: bool
    what: str  # one line for the table


@dataclass(frozen=True)
class Arm:
    title: str
    environment: Mapping[str, str]
    judge: Callable[[Outcome, Outcome | None], Verdict]


def judge_clean(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if run.swa_peak < SWA_GOAL:
        return Verdict(False, f"SWA pool peaked at {run.swa_peak:.0%}, wanted {SWA_GOAL:.0%}")
    return Verdict(
        True,
        f"completes; SWA pool peaks at {run.swa_peak:.0%}, "
        f"accept length {run.result['accept_length']:.2f}",
    )


def judge_broken(run: Outcome, clean: Outcome | None) -> Verdict:
    if run.completed:
        return Verdict(False, "completed: the fault did not bite")
    if not run.illegal_access:
        return Verdict(False, f"died of something else (status {run.status}); log: {run.log}")
    return Verdict(True, f"dies: illegal memory access, reported in {blamed(run)}")


def judge_diagnosed(run: Outcome, clean: Outcome | None) -> Verdict:
    record = dump_of(run)
    if record is None:
        return Verdict(False, f"no dump (status {run.status}); log: {run.log}")
    finding, where = record.finding, record.finding.location
    wanted = {
        "a sliding layer": where.layer_kind == "sliding",
        "the draft": where.runner == "draft",
        "a full-pool page": "full-pool page" in finding.headline,
        "a page beyond the SWA pool": record.table is not None
        and int(record.table.bad[0, 2]) >= record.table.pool.pages,
        "the request": bool(where.request) and where.request in finding.headline,
        "the headline before SGLang's own words": headline_first(run, finding.headline),
    }
    missing = [name for name, found in wanted.items() if not found]
    if missing:
        return Verdict(False, f"the finding does not name {', '.join(missing)}")
    return Verdict(
        True,
        f"stops at step {where.step}: {where.layer_kind} layer {where.layer}, "
        f"row {where.row}, column {where.column}",
    )


def judge_fixed(run: Outcome, clean: Outcome | None) -> Verdict:
    if not run.completed:
        return Verdict(False, f"did not complete (status {run.status}); log: {run.log}")
    if clean is None or not clean.completed:
        return Verdict(False, "completes, but there is no clean run to compare with")
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    if same < len(pairs):
        return Verdict(False, f"only {same} of {len(pairs)} outputs equal the clean arm's")
    return Verdict(
        True,
        f"completes; all {same} outputs equal the clean arm's, "
        f"accept length {run.result['accept_length']:.2f}",
    )


ARMS: dict[str, Arm] = {
    "clean": Arm("SGLang as installed", {}, judge_clean),
    "broken": Arm("the bug, debug off", {**FAULT, **FIX_OFF}, judge_broken),
    "diagnosed": Arm("the bug, debug on", {**FAULT, **FIX_OFF, **DEBUG}, judge_diagnosed),
    "fixed": Arm("the bug, fix swa-state-swap on", FAULT, judge_fixed),
}


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


def viewer() -> str:
    """How to call g4debug from here: by name if it is on PATH, else by its place."""
    script = Path(sys.executable).with_name("g4debug")
    if shutil.which("g4debug") or not script.exists():
        return "g4debug"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


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
        return dump.read(path)
    except dump.DumpError:
        return None


def run_all(
    names: list[str], device: str, workload: Workload, folder: Path, console: Console
) -> dict[str, tuple[Outcome, Verdict]]:
    done: dict[str, tuple[Outcome, Verdict]] = {}
    for number, name in enumerate(names, 1):
        arm = ARMS[name]
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
                name, device, workload.requests, environment, folder, workload.limit, progress
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
        explain(name, run, console)
    return done


def explain(name: str, run: Outcome, console: Console) -> None:
    """What the user would have seen of this arm."""
    if name == "broken":
        for line in run.traceback():
            console.print(Text(f"    {line}", "dim"), soft_wrap=True)
    elif name == "diagnosed":
        record, path = dump_of(run), dump_path(run)
        if record is not None:
            console.print(Text(f"    {record.finding.headline}", "bold"), soft_wrap=True)
            console.print(
                Text(f"    dump: {path}\n    next: {viewer()} show {path}"), soft_wrap=True
            )


def summary(done: dict[str, tuple[Outcome, Verdict]]) -> Table:
    table = Table(title="e4b_trtllm_mtp: Gemma-4 E4B shape, trtllm_mha, FROZEN_KV_MTP")
    for column in ("arm", "switches", "as it should", "what happened", "s"):
        table.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
    for name, (run, verdict) in done.items():
        switches = " ".join(f"{k}={v}" for k, v in ARMS[name].environment.items())
        table.add_row(
            name,
            switches or "none",
            "yes" if verdict.good else "NO",
            verdict.what,
            f"{run.seconds:.0f}",
        )
    return table


def as_json(device: str, done: dict[str, tuple[Outcome, Verdict]]) -> dict[str, Any]:
    arms = {
        name: {
            "good": verdict.good,
            "what": verdict.what,
            "status": run.status,
            "seconds": round(run.seconds, 2),
            "swa_peak": run.swa_peak,
            "dump": str(dump_path(run)) if name == "diagnosed" else None,
            **{k: v for k, v in run.result.items() if k != "tokens"},
        }
        for name, (run, verdict) in done.items()
    }
    return {"device": device, "arms": arms, "good": all(a["good"] for a in arms.values())}


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(DEVICES), help="default: cuda if there is one")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="only this; repeatable")
    parser.add_argument("--requests", type=int, default=0, help="default: what fills the SWA pool")
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.add_argument("--keep", action="store_true", help="keep the arms' logs and say where")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    console = Console(stderr=args.json, highlight=False)
    device = args.device or default_device()
    names = [n for n in ARMS if not args.arm or n in args.arm]
    if "fixed" in names and "clean" not in names:
        names.insert(0, "clean")  # fixed is judged by clean's tokens
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    good = False
    try:
        workload = DEVICES[device](args.requests or None)
        done = run_all(names, device, workload, folder, console)
        good = all(verdict.good for _, verdict in done.values())
        console.print(summary(done))
        if args.json:
            print(json.dumps(as_json(device, done), indent=2))
    except KeyboardInterrupt:
        console.print("stopped; no process of ours is left")
        return 130
    finally:
        if args.keep or not good:
            console.print(Text(f"logs: {folder}"), soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
