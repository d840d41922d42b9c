"""Prints the result of ``g4debug replay``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters import json
from g4debug.reporters.text import cleaned, hang

TONES = {0: "green", 1: "yellow", 2: "red"}


@dataclass(frozen=True)
class Kept:
    """A request that is needed. when: it comes, in words. longest: its ``max_new_tokens``, -1 for
    none. how: it ended."""

    id: int
    when: str
    prompt: int
    output: int
    longest: int
    how: str


@dataclass(frozen=True)
class Shrunk:
    """The smallest workload with which the finding comes. whole: nothing is left to try.

    file: the dump of the finding with this workload, '' if it was not written. why: something is
    left to try, or there is no file.
    """

    before: int
    tried: int
    seconds: float
    whole: bool
    file: str
    kept: tuple[Kept, ...]
    why: str = ""


@dataclass(frozen=True)
class Scripted:
    """The smallest workload as plain SGLang. file: '' if none was written. text: what it shows, or
    why there is none."""

    file: str
    text: str


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    code: 0 if it did and found the same, 1 if it found something else or nothing, 2 if that cannot
    be told. equal: steps that were equal, of ``steps``; -1 if they could not be compared.
    pages_compared: in how many of them the places of all pages were. differs: the first step that
    differs, 0 if none does. begins: see ``Tape``. faults: that were injected again. table_of: the
    finding whose coming is told of other fixes and releases, if it is not like the dump's. untried:
    why none was tried, although some were asked for.
    """

    code: int
    text: str
    more: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    release: str = ""
    requests: int = 0
    steps: int = 0
    equal: int = -1
    pages_compared: int = -1
    differs: int = 0
    begins: str = ""
    seconds: float = 0.0
    faults: str = ""
    shrunk: Shrunk | None = None
    tried: tuple[tuple[str, str], ...] = ()  # with another fix or release: name, what came of it
    table_of: str = ""
    untried: str = ""
    script: Scripted | None = None

    @property
    def whence(self) -> str:
        """Where its tape begins, in words."""
        return BEGINS.get(self.begins, self.begins)

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """The rows of the table of who has it: first as it was, then each other fix and release."""
        if not self.tried:
            return ()
        return ((f"SGLang {self.release}, as it was there", "it comes"), *self.tried)


# How the server was where a tape begins -> the place, in words.
BEGINS = {
    "start": "where the server started",
    "flush": "where its cache was flushed",
    "idle": "a moment in which it was idle",
    "busy": "the middle of its work",
}


def render(result: Replayed, console: Console) -> None:
    result = cleaned(result)

    def say(text: str) -> None:
        hang(console, Text(text), "  ")

    hang(console, Text(result.text, style=TONES.get(result.code, "")), "", 2)
    for line in result.more:
        say(line)
    if result.release:
        said = (
            f"{result.requests} requests, {result.steps} steps from {result.whence}; SGLang "
            f"{result.release} on the CPU engine, {result.seconds:.0f} s"
        )
        if result.pages_compared >= 0 and result.steps:
            said += f"; the places of all pages were compared in {result.pages_compared} steps"
        say(said)
    if result.faults:
        say(f"injected again: {result.faults}")
    for note in result.notes:
        say(f"not as it was: {note}")
    if result.untried:
        say(f"not tried with another fix or release: {result.untried}")
    if result.tried:
        if result.table_of:
            say(f"whether this comes, which was found here: {result.table_of}")
        wide = max(len(name) for name, _ in result.compared)
        for name, what in result.compared:
            hang(console, Text(f"{name:{wide}}  {what}"), "  ", 4 + wide)
    if result.shrunk is not None:
        _render_shrunk(result.shrunk, console, say)
    if result.script is not None:
        if result.script.file:
            say(f"script: {result.script.file} was run, and shows {result.script.text}")
        else:
            say(f"no script was written: {result.script.text}")


def _render_shrunk(shrunk: Shrunk, console: Console, say: Callable[[str], None]) -> None:
    tried = f"{shrunk.tried} tries, {shrunk.seconds:.0f} s"
    if not shrunk.kept:
        say(f"shrinking: {shrunk.why or 'the finding did not come a second time'} ({tried})")
        return
    end = f"; {shrunk.why}" if shrunk.why else ""
    say(f"shrunk: {len(shrunk.kept)} of {shrunk.before} requests are enough ({tried}{end})")
    for r in shrunk.kept:
        answer = f"an answer of {r.output}"
        if r.output != r.longest:
            answer += ("" if r.longest < 0 else f" of at most {r.longest}") + f" ({r.how})"
        text = f"request {r.id}, {r.when}: a prompt of {r.prompt} tokens, {answer}"
        hang(console, Text(text), "    ", 6)
    if shrunk.file:
        say(f"its dump: {shrunk.file}")


def render_json(result: Replayed, stream: IO[str]) -> None:
    json.write(result, stream)
