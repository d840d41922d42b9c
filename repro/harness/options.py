"""The scripts' command lines: a parser of a docstring, options that recur, the folder of logs."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from g4debug import discovery
from g4debug.cpu.server import DEFAULT
from g4debug.hooking import targets
from harness import render


class Parser(argparse.ArgumentParser):
    """``--help`` shows a script's docstring, and below the options its variants: name -> title."""

    def __init__(self, doc: str | None, variants: Mapping[str, str] | None = None) -> None:
        paragraphs = (" ".join(p.split()) for p in (doc or "").strip().split("\n\n"))
        text = "\n\n".join("\n".join(render.lines(p, 79)) for p in paragraphs)
        found = ["variants:"] if variants else []
        for name, title in (variants or {}).items():
            found += render.lines(f"{name:13} {title}", 79, 2, 14)
        super().__init__(
            description=text.replace("``", ""),
            epilog="\n".join(found),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def number(
        self, flag: str, what: str, default: float, metavar: str = "N", type: Any = int
    ) -> None:
        help = f"{what} (default: {default})"
        self.add_argument(flag, type=type, default=default, metavar=metavar, help=help)

    def model(self, *more: str) -> None:
        """``--model``: a toy of the CPU engine's. more: other words that it takes."""
        self.add_argument(
            "--model",
            choices=(*discovery.names("toy"), *more),
            default=DEFAULT,
            metavar="NAME",
            help="the toy model that the CPU engine serves: "
            f"{', '.join((*discovery.names('toy'), *more))} (default: {DEFAULT})",
        )

    def out(self, what: str) -> None:
        self.add_argument("--out", type=Path, metavar="FILE", help=what)

    def results(self, what: str) -> None:
        self.add_argument("--results", type=Path, metavar="FOLDER", help=what)

    def keep(self, what: str) -> None:
        self.add_argument(
            "--keep", action="store_true", help=f"keep the {what} and say where they are"
        )


def left_out(console: Console, why: Mapping[str, str], model: str) -> None:
    """Say what a model cannot have. why: what is left out -> the reason."""
    for name, reason in why.items():
        render.say(console, f"{name} is left out on {model}: {reason}.", hang=4)


def page(docs: Path, kind: str, model: str) -> Path:
    """The page of a suite's kind, for the installed SGLang and a model."""
    of = "" if model == DEFAULT else f"-{model}"
    return docs / f"{kind}-{targets.sglang_version()}{of}.md"


def results_of(folder: Path, model: str) -> Path:
    """The folder in which a model's results are kept, beside those of Gemma-4."""
    found = folder if model == DEFAULT else folder / model
    found.mkdir(parents=True, exist_ok=True)
    return found


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Logs:
    """Where a script's children leave their logs. good: nobody needs them any more."""

    folder: Path
    good: bool = False

    @property
    def status(self) -> int:
        """The script's exit code."""
        return 0 if self.good else 1


@contextmanager
def logs(
    script: str, console: Console, said: str, keep: bool = False, given: Path | None = None
) -> Iterator[Logs]:
    """The folder for logs: ``given``, or one that is removed at the end if all is good.

    said: the sentence in front of its place, where it stays. keep: it stays in any case.
    """
    found = Logs(given or Path(tempfile.mkdtemp(prefix=f"g4debug-{script}-")))
    found.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield found
    finally:
        if keep or given or not found.good:
            render.for_copying(console, said, str(found.folder))
        else:
            shutil.rmtree(found.folder, ignore_errors=True)
