"""What the repro scripts share: variants, what is said of their runs, and the command line."""

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
from typing import Any, NamedTuple

import _render
from _render import QUOTE
from _run import Outcome, Stopped, listen, run_variant
from rich.console import Console

from g4debug.dumps import errors, reading
from g4debug.findings.record import TrapRecord
from g4debug.hooking import targets
from g4debug.settings import DEFAULT_DUMP_DIR

DEBUG = {"SGLANG_TRTLLM_MHA_DEBUG": "1"}
CPU_ONLY = (
    "This script runs on the CPU engine only, which does not start on a machine with a GPU. This "
    "command hides the GPU:\n    CUDA_VISIBLE_DEVICES='' python repro/{}.py"
)
ELSEWHERE = (
    "What this script shows is in SGLang {0}, and this environment has SGLang {1}. Run these two "
    "commands instead:\n"
    "    make env SGLANG={2}\n"
    "    {3}/bin/python repro/{4}"
)
DEVICE_NAMES = {"cpu": "the CPU engine, which needs no GPU", "cuda": "the GPU"}


class Verdict(NamedTuple):
    """good: the variant did what it should. what: what it did, in one or two sentences."""

    good: bool
    what: str


@dataclass(frozen=True)
class Variant:
    """``judge(run, clean)`` gets this variant's outcome, and that of clean if it ran before.

    workload: ``MODULE`` or ``MODULE:NAME`` of this folder, see :mod:`_variant`. explain: what is
    shown of the run because a user would have seen it: "traceback", "finding" or nothing.
    """

    title: str
    environment: Mapping[str, str]
    judge: Callable[[Outcome, Outcome | None], Verdict]
    workload: str = "_workload"
    explain: str = ""


@dataclass(frozen=True)
class Repro:
    """A script: its title, and its variants in the order in which they run.

    compares: the variants whose tokens are compared with those of the variant ``clean``.
    elsewhere: what to say on a device that is not in ``devices``; an indented line is a command.
    releases: the SGLang versions that it shows something of, as in ``targets.matches``; on others
    it says so and names ``shown_on``.
    """

    title: str
    variants: Mapping[str, Variant]
    devices: Mapping[str, Callable[[int | None], Any]]
    compares: tuple[str, ...] = ()
    elsewhere: str = ""
    releases: str = ""
    shown_on: str = "0.5.12.post1"


def not_completed(run: Outcome) -> str:
    if run.status is None:
        return f"It took too long and was stopped after {run.seconds:.0f} s."
    return f"It did not complete (exit status {run.status})."


def died_otherwise(run: Outcome, expected: str) -> str:
    """What is said of a run whose log does not show the error that was expected."""
    return f"{not_completed(run)} The expected error is not in its log: {expected}."


def not_comparable(run: Outcome, clean: Outcome | None) -> str:
    """Why this run cannot be compared with the clean one; empty if it can."""
    if not run.completed:
        return not_completed(run)
    if clean is None or not clean.completed:
        return "It completes, but there is no clean run to compare it with."
    return ""


def accept_length(run: Outcome) -> str:
    return f"The mean accept length is {run.result['accept_length']:.2f}."


def same_outputs(run: Outcome, clean: Outcome | None) -> Verdict:
    """Good if it completed and every output equals the clean one, token by token."""
    why_not = not_comparable(run, clean)
    if why_not or clean is None:
        return Verdict(False, why_not)
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    same = sum(a == b for a, b in pairs)
    if same < len(pairs):
        return Verdict(
            False, f"It completes, but only {same} of {len(pairs)} outputs equal those of clean."
        )
    return Verdict(
        True, f"It completes, and all {same} outputs equal those of clean. {accept_length(run)}"
    )


def blamed(run: Outcome) -> str:
    """The innermost SGLang function in the traceback, and its file."""
    frames = [line for line in run.text.splitlines() if line.startswith('  File "')]
    for line in reversed(frames):
        path, _, function = line.partition(", line")
        if "sglang" in path:
            return f"{function.rpartition(' in ')[2]} ({Path(path.split(chr(34))[1]).name})"
    return "no function of SGLang"


def headline_first(run: Outcome, headline: str) -> bool:
    text = run.text
    other = text.find("Scheduler hit an exception")
    return 0 <= text.find(headline) < (other if other >= 0 else len(text))


def dump_path(run: Outcome) -> Path | None:
    """The dump that the run's log names."""
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
    except errors.DumpError:
        return None


def no_dump(run: Outcome) -> Verdict:
    ended = "It completed" if run.completed else not_completed(run).rstrip(".")
    return Verdict(False, f"{ended}, and left no dump that can be read.")


def not_named(missing: list[str]) -> Verdict:
    return Verdict(False, f"There is a finding, but it does not name {', '.join(missing)}.")


def viewer() -> str:
    """How to call g4debug from here: by name if it is on PATH, else by its place."""
    script = Path(sys.executable).with_name("g4debug")
    if shutil.which("g4debug") or not script.exists():
        return "g4debug"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)


Done = dict[str, tuple[Outcome, Verdict]]


def run_all(
    repro: Repro,
    names: list[str],
    device: str,
    requests: int,
    timeout: float,
    folder: Path,
    console: Console,
) -> Done:
    done: Done = {}
    for number, name in enumerate(names, 1):
        variant = repro.variants[name]
        environment = dict(variant.environment)
        if DEBUG.items() <= environment.items():
            environment["SGLANG_TRTLLM_MHA_DEBUG_DIR"] = str(DEFAULT_DUMP_DIR)
        _render.say(console, f"[{number}/{len(names)}] {name}: {variant.title}", hang=QUOTE)
        status = console.status("starting") if console.is_terminal else nullcontext()
        with status as spinner:

            def progress(text: str, spinner: Any = spinner) -> None:
                if spinner is not None:
                    spinner.update(text)

            run = run_variant(
                name, device, requests, environment, folder, timeout, progress, variant.workload
            )
        verdict = variant.judge(run, done["clean"][0] if "clean" in done else None)
        done[name] = (run, verdict)
        after = f"It ended after {run.seconds:.0f} s"
        if verdict.good:
            _render.say(console, f"{after} and did what it should.", QUOTE, style="green")
        else:
            _render.say(console, f"{after} and did NOT do what it should.", QUOTE, style="bold red")
            _render.say(console, verdict.what, QUOTE)
        explain(variant, run, console)
    return done


def explain(variant: Variant, run: Outcome, console: Console) -> None:
    """What the user would have seen of this run."""
    if variant.explain == "traceback" and (found := run.traceback()):
        _render.say(console, "A user sees this:", QUOTE)
        _render.traceback(console, found)
    elif variant.explain == "finding" and (record := dump_of(run)) is not None:
        _render.say(console, "g4debug logs this finding:", QUOTE)
        _render.quote(console, record.finding.headline, style="bold")


def blocks(repro: Repro, done: Done) -> list[_render.Block]:
    return [
        _render.Block(
            name=name,
            good=verdict.good,
            what=verdict.what,
            title=repro.variants[name].title,
            seconds=run.seconds,
            switches=repro.variants[name].environment,
            log=run.log,
        )
        for name, (run, verdict) in done.items()
    ]


def summary(repro: Repro, done: Done, console: Console) -> None:
    _render.summary(console, "What happened in each variant:", blocks(repro, done))
    for name, (run, _) in done.items():
        path = dump_path(run) if repro.variants[name].explain == "finding" else None
        if path is not None:
            console.print()
            intro = f"The variant {name} left a dump. This command shows what is in it:"
            _render.for_copying(console, intro, f"{viewer()} show {path}")


def as_json(repro: Repro, device: str, done: Done) -> dict[str, Any]:
    """The key "arms" is older than the word *variant*; scripts read it."""
    found = {
        name: {
            "good": verdict.good,
            "what": verdict.what,
            "status": run.status,
            "seconds": round(run.seconds, 2),
            "swa_peak": run.swa_peak,
            "dump": str(dump_path(run)) if repro.variants[name].explain == "finding" else None,
            **{k: v for k, v in run.result.items() if k != "tokens"},
        }
        for name, (run, verdict) in done.items()
    }
    return {"device": device, "arms": found, "good": all(v["good"] for v in found.values())}


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def arguments(repro: Repro, doc: str, requests: str) -> argparse.Namespace:
    parser = _render.parser(doc, {name: v.title for name, v in repro.variants.items()})
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to run: on the CPU engine or on a GPU (default: cuda if there is a GPU)",
    )
    parser.add_argument(
        "--variant",
        "--arm",
        dest="variants",
        action="append",
        choices=list(repro.variants),
        metavar="NAME",
        help="run only this variant; may be given several times. If it is compared with clean, "
        "clean runs, too",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=0,
        metavar="N",
        help=f"how many requests each variant serves (default: {requests})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON on stdout, and everything else on stderr",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the variants' logs and say where they are"
    )
    return parser.parse_args()


def not_here(repro: Repro) -> str:
    """Why the script shows nothing on the installed SGLang, and where it does, or ''."""
    if not repro.releases or targets.matches(repro.releases):
        return ""
    found, script = targets.sglang_version() or "none", Path(sys.argv[0]).name
    folder = environment_of(repro.shown_on)
    return ELSEWHERE.format(repro.releases, found, repro.shown_on, folder, script)


def environment_of(release: str) -> str:
    """The folder that ``make env SGLANG=release`` makes; that of the default has no number."""
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    is_default = f"\nSGLANG_DEFAULT := {release}\n" in makefile
    return ".venv" if is_default else f".venv-{release}"


def main(repro: Repro, doc: str, requests: str) -> int:
    """Run the variants that were asked for. Returns 0 if all did what they should, 1 if one did
    not, 2 if the script cannot run on this device or SGLang, and 128 plus its number after a signal
    (Ctrl-C: 130).
    """
    args = arguments(repro, doc, requests)
    listen()
    console = Console(stderr=args.json, highlight=False)
    device = args.device or default_device()
    refused = not_here(repro) or ("" if device in repro.devices else repro.elsewhere)
    if refused:
        for line in refused.splitlines():
            if line.startswith(" "):
                _render.verbatim(console, line)  # a command
            else:
                _render.say(console, line)
        return 2
    names = [n for n in repro.variants if not args.variants or n in args.variants]
    if "clean" not in names and set(names) & set(repro.compares):
        names.insert(0, "clean")
    folder = Path(tempfile.mkdtemp(prefix="g4debug-repro-"))
    good = False
    try:
        timeout = repro.devices[device](args.requests or None).timeout
        _render.say(console, repro.title, style="bold")
        _render.say(
            console,
            f"Each variant starts real SGLang in processes of its own, on {DEVICE_NAMES[device]}.",
        )
        console.print()
        done = run_all(repro, names, device, args.requests, timeout, folder, console)
        good = all(verdict.good for _, verdict in done.values())
        summary(repro, done, console)
        if args.json:
            print(json.dumps(as_json(repro, device, done), indent=2))
    except Stopped as stopped:
        console.print("stopped; no process of ours is left")
        return stopped.status
    finally:
        if args.keep or not good:
            _render.for_copying(console, "The logs of the variants are kept in:", str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1
