"""A script that shows a bug: its variants, their runs, and its command line."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from g4debug.findings.decisive import DECISIVE
from g4debug.hooking import targets
from g4debug.settings import DEFAULT_DUMP_DIR
from harness import render
from harness.options import Parser, default_device, logs
from harness.processes import Outcome, Stopped, listen, run_child
from harness.render import QUOTE
from harness.verdicts import Judge, Verdict, dump_of, dump_path
from harness.workload import Make

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
EXIT_CODE = (
    "The exit code is 0 if every variant did what it should, 1 if one did not, and 2 for wrong "
    "arguments{}."
)
DEVICE_NAMES = {"cpu": "the CPU engine, which needs no GPU", "cuda": "the GPU"}


@dataclass(frozen=True)
class Variant:
    """One run of a script.

    against: the variant with which it is compared, if its judge compares. workload: a dict of the
    module with the script's workloads. explain: the part of the run that a user would have seen,
    which is shown: "traceback", "finding" or nothing. replays: the variant whose dump is replayed,
    in place of a run of the workload; a replay is for a machine without a GPU.
    """

    title: str
    environment: Mapping[str, str]
    judge: Judge
    workload: str = "DEVICES"
    explain: str = ""
    against: str = "clean"
    replays: str = ""


def broken(title: str, environment: Mapping[str, str], judge: Judge, **more: Any) -> Variant:
    """A variant that dies. A user sees a traceback."""
    return Variant(title, environment, judge, explain="traceback", **more)


def diagnosed(title: str, environment: Mapping[str, str], judge: Judge, **more: Any) -> Variant:
    """A variant with debugging on. A user sees a finding."""
    return Variant(title, {**environment, **DEBUG}, judge, explain="finding", **more)


@dataclass(frozen=True)
class Repro:
    """A script: its name, its workload in words (``serves``), and its variants in running order.

    workload: the module with its workloads, if it is not the script itself. child: the module that
    serves one of them, as ``harness.engine`` does, and writes the results for the judges.
    elsewhere: the message on a device that is not in ``devices``; an indented line is a command.
    refuses: further reasons, beside wrong arguments, to end with 2; they go on the sentence in its
    help. releases: the SGLang versions on which it shows something, as in ``targets.matches``; it
    says so on others, and names ``shown_on``. hidden: keys of a result that ``--json`` leaves out.
    """

    name: str
    serves: str
    variants: Mapping[str, Variant]
    elsewhere: str = ""
    refuses: str = ""
    releases: str = ""
    shown_on: str = "0.5.12.post1"
    workload: str = ""
    child: str = "harness.engine"
    hidden: tuple[str, ...] = ("tokens",)

    @property
    def title(self) -> str:
        return f"{self.name}: {self.serves}"

    @property
    def module(self) -> str:
        return self.workload or self.name

    @property
    def devices(self) -> Mapping[str, Make]:
        """The workload of each device that it runs on."""
        found: dict[str, Make] = importlib.import_module(self.module).DEVICES
        return found


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
        render.say(console, f"[{number}/{len(names)}] {name}: {variant.title}", hang=QUOTE)
        status = console.status("starting") if console.is_terminal else nullcontext()
        with status as spinner:

            def progress(text: str, spinner: Any = spinner) -> None:
                if spinner is not None:
                    spinner.update(text)

            workload = f"{repro.module}:{variant.workload}"
            child, arguments = repro.child, {"workload": workload, "requests": requests}
            dump = dump_path(done[variant.replays][0]) if variant.replays else None
            if variant.replays and dump is None:
                run = Outcome(name, None, 0, folder / f"{name}.log")
                run.log.touch()
                verdict = Verdict(False, f"{variant.replays} left no dump that could be replayed.")
            else:
                if variant.replays:
                    child, arguments = "harness.replaying", {"dump": str(dump)}
                # One variant alone gains nothing. A replay starts SGLang in a process of its own.
                warm = device == "cpu" and len(names) > 1 and not variant.replays
                run = run_child(
                    name, child, arguments, environment, folder, timeout, device=device,
                    progress=progress, warm=warm and DECISIVE.isdisjoint(environment),
                )  # fmt: skip
                against = done[variant.against][0] if variant.against in done else None
                verdict = variant.judge(run, against)
        done[name] = (run, verdict)
        after = f"It ended after {run.seconds:.0f} s"
        if verdict.good:
            render.say(console, f"{after}, as expected.", QUOTE, style="green")
        else:
            render.say(console, f"{after}, and NOT as expected.", QUOTE, style="bold red")
            render.say(console, verdict.what, QUOTE)
        explain(variant, run, console)
    return done


def explain(variant: Variant, run: Outcome, console: Console) -> None:
    """Print the traceback or the finding that a user would have seen in this run."""
    if variant.explain == "traceback" and (found := run.traceback()):
        render.say(console, "A user sees this:", QUOTE)
        render.traceback(console, found)
    elif variant.explain == "finding" and (record := dump_of(run)) is not None:
        render.say(console, "g4debug logs this finding:", QUOTE)
        render.quote(console, record.finding.headline, style="bold")


def blocks(repro: Repro, done: Done) -> list[render.Block]:
    return [
        render.Block(
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
    render.summary(console, "What happened in each variant:", blocks(repro, done))
    for name, (run, _) in done.items():
        path = dump_path(run) if repro.variants[name].explain == "finding" else None
        if path is not None:
            console.print()
            intro = f"The variant {name} left a dump. This command shows what is in it:"
            render.for_copying(console, intro, f"{viewer()} show {path}")
        if path is not None and any(v.replays == name for v in repro.variants.values()):
            intro = "This one replays it, and finds the fewest requests that are enough:"
            command = f"{viewer()} replay {path} --pages-only --shrink small.pt"
            render.for_copying(console, intro, command)


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
            **{k: v for k, v in run.result.items() if k not in repro.hidden},
        }
        for name, (run, verdict) in done.items()
    }
    return {"device": device, "arms": found, "good": all(v["good"] for v in found.values())}


def arguments(repro: Repro, doc: str | None, requests: str) -> argparse.Namespace:
    parser = Parser(
        f"{doc}\n\n{EXIT_CODE.format(repro.refuses)}",
        {name: v.title for name, v in repro.variants.items()},
    )
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
        help="run only this variant; may be given several times. If it is compared with another "
        "one, that one runs, too",
    )
    parser.set_defaults(requests=0)
    if requests:
        what = f"how many requests each variant serves (default: {requests})"
        parser.add_argument("--requests", type=int, default=0, metavar="N", help=what)
    what = "print the result as JSON on stdout, and everything else on stderr"
    parser.add_argument("--json", action="store_true", help=what)
    parser.keep("variants' logs")
    return parser.parse_args()


def not_here(repro: Repro) -> str:
    """Why the script shows nothing on the installed SGLang, and where it does, or ''."""
    if not repro.releases or targets.matches(repro.releases):
        return ""
    found, script = targets.sglang_version() or "none", Path(sys.argv[0]).name
    folder = environment_of(repro.shown_on)
    return ELSEWHERE.format(repro.releases, found, repro.shown_on, folder, script)


def environment_of(release: str) -> str:
    """The folder that ``make env SGLANG=release`` makes; the default release's has no number."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    is_default = f"\nSGLANG_DEFAULT := {release}\n" in makefile
    return ".venv" if is_default else f".venv-{release}"


def main(repro: Repro, doc: str | None, requests: str) -> int:
    """Run the variants that were asked for. requests: how the help calls the usual number of
    requests; '' if it cannot be chosen. Returns 0 if all did what they should, 1 if one did
    not, 2 if the script cannot run on this device or SGLang, and 128 plus its number after a signal
    (Ctrl-C: 130).
    """
    args = arguments(repro, doc, requests)
    listen()
    console = Console(stderr=args.json, highlight=False)
    device = args.device or default_device()
    elsewhere = "" if device in repro.devices else repro.elsewhere.format(repro.name)
    if refused := not_here(repro) or elsewhere:
        for line in refused.splitlines():
            if line.startswith(" "):
                render.verbatim(console, line)  # a command
            else:
                render.say(console, line)
        return 2
    wanted = set(args.variants or repro.variants)
    chosen = [v for n, v in repro.variants.items() if n in wanted]
    wanted |= {v.against for v in chosen if v.judge.compares} | {v.replays for v in chosen}
    names = [n for n, v in repro.variants.items() if n in wanted]
    if device != "cpu":
        names = [n for n in names if not repro.variants[n].replays]
    with logs("repro", console, "The logs of the variants are kept in:", args.keep) as kept:
        try:
            timeout = repro.devices[device](args.requests or None).timeout
            render.say(console, repro.title, style="bold")
            render.say(
                console,
                "Each variant starts real SGLang in processes of its own, on "
                f"{DEVICE_NAMES[device]}.",
            )
            console.print()
            done = run_all(repro, names, device, args.requests, timeout, kept.folder, console)
            kept.good = all(verdict.good for _, verdict in done.values())
            summary(repro, done, console)
            if args.json:
                print(json.dumps(as_json(repro, device, done), indent=2))
        except Stopped as stopped:
            console.print("stopped; no process of ours is left")
            return stopped.status
    return kept.status
