"""How the repro scripts print: lines are broken at spaces only, so that every name stays whole.

There is no table: its columns would be too narrow for names like
``scheduler_output_processor_mixin.py`` in a terminal of 80 columns. Each variant gets a block of
lines instead. A path or a command, which somebody will copy, has a line of its own.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

WIDEST = 100  # columns: longer lines are hard to read
INDENT = 5  # of a block's text, behind "ok" or "BAD"
QUOTE = 4  # of the sentences and quotations below "[1/4] broken: …"
_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = re.compile(rf'(?<=File ")(?:[^"]*/site-packages/|{re.escape(str(_ROOT))}/)')


@dataclass(frozen=True)
class Block:
    """The report on one variant. switches: None if it makes no sense to name them.

    log: shown only if the variant did not do what it should.
    """

    name: str
    good: bool
    what: str
    title: str = ""
    seconds: float | None = None
    switches: Mapping[str, str] | None = None
    log: Path | None = None


def lines(text: str, width: int, indent: int = 0, hang: int = 0) -> list[str]:
    """``text`` in lines of at most ``width`` columns; a longer word gets a line of its own."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(console: Console, text: str, indent: int = 0, hang: int = 0, style: str = "") -> None:
    for line in lines(text, min(console.width, WIDEST), indent, hang):
        verbatim(console, line, style)


def verbatim(console: Console, line: str, style: str = "") -> None:
    """A line as it is, however long: the terminal breaks it, and it can be copied as a whole."""
    console.print(Text(line, style), soft_wrap=True)


def for_copying(console: Console, intro: str, line: str, indent: int = 0) -> None:
    """A sentence, and below it a path or a command."""
    say(console, intro, indent)
    verbatim(console, " " * (indent + 4) + line)


def titles(console: Console, known: Mapping[str, Any]) -> None:
    """A line for each thing that a script can run, with its ``title``."""
    for name, it in known.items():
        say(console, f"{name}: {it.title}", hang=4)


def quote(console: Console, line: str, indent: int = QUOTE, hang: int = 2, style: str = "") -> None:
    """A line of a log. In a file or a pipe it stays whole, so that grep finds its words."""
    if console.is_terminal:
        say(console, line, indent, hang, style)
    else:
        verbatim(console, " " * indent + line, style)


def traceback(console: Console, found: Iterable[str]) -> None:
    """A traceback. Files of installed packages and of this repository lose their first folders."""
    for line in found:
        short = _FOLDERS.sub("", line)
        own = len(short) - len(short.lstrip())
        quote(console, short.lstrip(), QUOTE + own, 4, "dim")


def block(console: Console, it: Block) -> None:
    heading = f"{it.name}: {it.title}" if it.title else it.name
    if it.seconds is not None:
        heading += f" ({it.seconds:.0f} s)"
    first, *rest = lines(heading, min(console.width, WIDEST), INDENT, 2)
    mark = Text("ok".ljust(INDENT), "green") if it.good else Text("BAD".ljust(INDENT), "bold red")
    console.print(mark.append(first[INDENT:], "bold"), soft_wrap=True)
    for line in rest:
        verbatim(console, line, "bold")
    label = "switches: "
    for switch in switches(it.switches) if it.switches is not None else []:
        verbatim(console, " " * INDENT + label + switch)
        label = " " * len(label)
    say(console, it.what, INDENT)
    if it.log is not None and not it.good:
        for_copying(console, "Its log:", str(it.log), INDENT)


def switches(given: Mapping[str, str]) -> list[str]:
    """Environment variables as a shell takes them, or "none"."""
    return [f"{name}={shlex.quote(value)}" for name, value in given.items()] or ["none"]


def summary(console: Console, title: str, blocks: Sequence[Block]) -> None:
    """All blocks below a title, and a sentence that counts them."""
    console.print()
    say(console, title, style="bold")
    for it in blocks:
        console.print()
        block(console, it)
    console.print()
    count(console, blocks)


def count(console: Console, blocks: Sequence[Block], noun: str = "variants") -> None:
    bad = [it.name for it in blocks if not it.good]
    if bad:
        text = f"{len(bad)} of {len(blocks)} {noun} did not do what they should: {', '.join(bad)}."
        say(console, text, style="bold red")
    elif len(blocks) == 1:
        say(console, "It did what it should.", style="green")
    else:
        say(console, f"All {len(blocks)} {noun} did what they should.", style="green")
