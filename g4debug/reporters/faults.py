"""The list of all faults: a paragraph for each, and then the grammar in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters import json
from g4debug.reporters.text import cleaned, hang

SILENT = "none: stress (no tracer may report it)"
LABEL = 11
GRAMMAR = (
    ("one fault", "NAME=[P%][N*]TASK[(ARGUMENT)][@SELECTOR=VALUE]..."),
    ("P%", "the probability at each opportunity (default: 100%)"),
    ("N*", "how often at most (default: no limit)"),
    ("off", "a task that every fault has; it does nothing"),
    ("@at=N", "every fault has it: only at its N-th opportunity, counted from 1; the log says N"),
    ("@step=N", "every fault has it: only in this worker step"),
    ("A->B", "when the count of A is used up, B takes over"),
    ("F;G;seed=7", "several faults, and the seed of their random draws (default: 0)"),
)
EXAMPLE = 'G4DEBUG_FAULTS="seed=7;page-oob=5%3*corrupt(1)@mode=decode" <your launch command>'


@dataclass(frozen=True)
class Entry:
    """One fault. ``broken``: why its file cannot be loaded here, or ''."""

    id: str
    title: str = ""
    tasks: Mapping[str, str] = field(default_factory=dict)  # task -> one line of help
    selectors: tuple[str, ...] = ()
    caught_by: tuple[str, ...] = ()
    recreates: str = ""
    drills: tuple[str, ...] = ()  # chains that make it do harm, e.g. "1*on"
    broken: str = ""


def render(entries: Sequence[Entry], console: Console) -> None:
    """Print the list. Only the example may be wider than the console."""
    for entry in cleaned(entries):
        _entry(entry, console)
        console.print()
    console.print(Text("GRAMMAR", "bold"))
    for name, meaning in GRAMMAR:
        _line(console, name, Text(meaning))
    console.print()
    console.print(Text(EXAMPLE, "bold cyan"), soft_wrap=True)


def render_json(entries: Sequence[Entry], stream: IO[str]) -> None:
    """Write one JSON object: ``faults`` (fields of :class:`Entry`), ``grammar``, ``example``."""
    json.write({"faults": entries, "grammar": dict(GRAMMAR), "example": EXAMPLE}, stream)


def _entry(entry: Entry, console: Console) -> None:
    console.print(Text(entry.id, "bold cyan"))
    if entry.broken:
        hang(console, Text(f"cannot be loaded here: {entry.broken}", "bold red"), "  ")
        return
    hang(console, Text(entry.title), "  ")
    for name, meaning in entry.tasks.items():
        _line(console, name, Text(meaning))
    if entry.selectors:
        _line(console, "selectors", Text(" ".join(f"@{s}=" for s in entry.selectors)))
    for chain in entry.drills[:1]:
        _line(console, "e.g.", Text(f"{entry.id}={chain}", "cyan"))
    caught = Text(", ".join(entry.caught_by), "green")
    _line(console, "caught by", caught if entry.caught_by else Text(SILENT, "yellow"))
    if entry.recreates:
        _line(console, "recreates", Text(f"the bug that fix {entry.recreates} fixes"))


def _line(console: Console, name: str, body: Text) -> None:
    hang(console, body, Text(f"  {name:<{LABEL}}", "dim"))
