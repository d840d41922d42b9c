"""The list of all faults: a paragraph for each, and then the grammar in a few lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters.text import clean

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
    for entry in entries:
        _entry(entry, console)
        console.print()
    console.print(Text("GRAMMAR", "bold"))
    for name, meaning in GRAMMAR:
        _line(console, f"{name:<{LABEL}}", Text(meaning))
    console.print()
    console.print(Text(EXAMPLE, "bold cyan"), soft_wrap=True)


def render_json(entries: Sequence[Entry], stream: IO[str]) -> None:
    """Write one JSON object: ``faults`` (fields of :class:`Entry`), ``grammar``, ``example``."""
    data = {
        "faults": [asdict(e) for e in entries],
        "grammar": dict(GRAMMAR),
        "example": EXAMPLE,
    }
    json.dump(data, stream, indent=2)
    stream.write("\n")


def _entry(entry: Entry, console: Console) -> None:
    console.print(Text(clean(entry.id), "bold cyan"))
    if entry.broken:
        _line(console, "", Text(f"cannot be loaded here: {clean(entry.broken)}", "bold red"))
        return
    _line(console, "", Text(clean(entry.title)))
    for name, meaning in entry.tasks.items():
        _line(console, f"{clean(name):<{LABEL}}", Text(clean(meaning)))
    if entry.selectors:
        names = Text(clean(" ".join(f"@{s}=" for s in entry.selectors)))
        _line(console, f"{'selectors':<{LABEL}}", names)
    for chain in entry.drills[:1]:
        _line(console, f"{'e.g.':<{LABEL}}", Text(clean(f"{entry.id}={chain}"), "cyan"))
    if entry.caught_by:
        caught = Text(", ".join(entry.caught_by), "green")
    else:
        caught = Text(SILENT, "yellow")
    _line(console, f"{'caught by':<{LABEL}}", caught)
    if entry.recreates:
        _line(console, f"{'recreates':<{LABEL}}", Text(f"the bug that fix {entry.recreates} fixes"))


def _line(console: Console, head: str, body: Text) -> None:
    """A line with a hanging indent."""
    room = max(16, console.width - 2 - len(head))
    for i, line in enumerate(body.wrap(console, room)):
        line.rstrip()
        left = Text(f"  {head if not i else ' ' * len(head)}", "dim")
        console.print(left.append_text(line), no_wrap=True, crop=False)
