"""Verdicts on the run of a variant, and the sentences that several scripts say of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from g4debug.dumps import errors, reading
from g4debug.findings.record import Finding, TrapRecord
from g4debug.hooking import targets
from harness.processes import Outcome


class Verdict(NamedTuple):
    """good: the variant did what it should. what: what it did, in one or two sentences."""

    good: bool
    what: str


class Bad(Exception):
    """A run failed. The text says what it did instead, in one or two sentences."""


@dataclass(frozen=True)
class Judge:
    """Judges a run. said: what a good run did; it raises Bad for another one.

    compares: ``said`` gets another run, too, and both have completed. dead: this one need not have.
    """

    said: Callable[..., str]
    compares: bool = False
    dead: bool = False

    def __call__(self, run: Outcome, other: Outcome | None = None) -> Verdict:
        try:
            if not self.compares:
                return Verdict(True, self.said(run))
            if not self.dead:
                completed(run)
            if other is None or not other.completed:
                raise Bad("It completes, but there is no good run to compare it with.")
            return Verdict(True, self.said(run, other))
        except Bad as e:
            return Verdict(False, str(e))


def judge(said: Callable[[Outcome], str]) -> Judge:
    """A judge of one run by itself."""
    return Judge(said)


def compared(said: Callable[[Outcome, Outcome], str]) -> Judge:
    """A judge that compares a run with another one."""
    return Judge(said, compares=True)


def not_completed(run: Outcome) -> str:
    if run.status is None:
        return f"It took too long and was stopped after {run.seconds:.0f} s."
    return f"It did not complete (exit status {run.status})."


def died_otherwise(run: Outcome, expected: str) -> str:
    """The sentence on a run if its log does not show the error that was expected."""
    return f"{not_completed(run)} The expected error is not in its log: {expected}."


def died_of(run: Outcome, error: str, place: str) -> list[str]:
    """The lines of its traceback. Raises Bad unless they show this error and this place."""
    if run.completed:
        raise Bad("It completes: the bug is not there.")
    frames = run.traceback(400)
    if not all(any(sign in line for line in frames) for sign in (error, place)):
        raise Bad(died_otherwise(run, error))
    return frames


def exact(run: Outcome) -> bool:
    """On the CPU engine in float32 answers do not hang on the batches; on a GPU they may."""
    return "float32" in run.text and "device='cpu'" in run.text


def only_if(good: bool, what: str) -> str:
    """Returns ``what`` if it is good; else raises Bad with that text."""
    if not good:
        raise Bad(what)
    return what


def completed(run: Outcome) -> None:
    """Raises Bad if it did not complete."""
    if not run.completed:
        raise Bad(not_completed(run))


def accept_length(run: Outcome) -> str:
    return f"The mean accept length is {run.result['accept_length']:.2f}."


def alike(run: Outcome, clean: Outcome) -> tuple[int, int]:
    """How many outputs are equal, token by token, and how many there are."""
    pairs = list(zip(run.result["tokens"], clean.result["tokens"], strict=True))
    return sum(a == b for a, b in pairs), len(pairs)


def different(run: Outcome) -> int:
    """How many of the outputs differ from each other."""
    return len({tuple(tokens) for tokens in run.result["tokens"]})


def equal_outputs(run: Outcome, clean: Outcome) -> str:
    """Raises Bad unless every output equals the clean one, token by token."""
    same, of = alike(run, clean)
    if same < of:
        raise Bad(f"It completes, but only {same} of {of} outputs equal those of clean.")
    return f"It completes, and all {same} outputs equal those of clean. {accept_length(run)}"


same_outputs = compared(equal_outputs)


@judge
def reproduced(run: Outcome) -> str:
    """Of a replay."""
    completed(run)
    text, more = run.result["text"], " ".join(run.result["more"])
    if not text.startswith("reproduced: "):
        raise Bad(f"It says: {text}. {more}")
    return f"It says: {text}. {more}"


@judge
def answers(run: Outcome) -> str:
    completed(run)
    return f"It completes, with {different(run)} different outputs."


def blamed(run: Outcome) -> str:
    """The innermost SGLang function in the traceback, and its file."""
    frames = [line for line in run.text.splitlines() if line.startswith('  File "')]
    sglang = f'  File "{targets.sglang_root()}/sglang/'
    for line in reversed(frames):
        path, _, function = line.partition(", line")
        if path.startswith(sglang):
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


def told(run: Outcome) -> TrapRecord:
    """The run's dump. Raises Bad if it left none."""
    record = dump_of(run)
    if record is None:
        ended = "It completed" if run.completed else not_completed(run).rstrip(".")
        raise Bad(f"{ended}, and left no dump that can be read.")
    return record


def must_name(run: Outcome, finding: Finding, wanted: Mapping[str, bool]) -> None:
    """Raises Bad if a finding lacks something, or comes after SGLang's own words.

    wanted: a thing that the finding should name -> whether it does.
    """
    missing = [name for name, found in wanted.items() if not found]
    if not headline_first(run, finding.headline):
        missing.append("the headline before SGLang's own words")
    if missing:
        raise Bad(f"There is a finding, but it does not name {', '.join(missing)}.")
