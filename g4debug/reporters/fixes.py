"""The fixes and their states, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4debug.reporters import json
from g4debug.reporters.text import cleaned

STYLES = {"applied": "green", "off": "yellow", "target-missing": "bold red"}


@dataclass(frozen=True)
class Row:
    """One fix. state: applied, not-needed, off, target-missing or unknown.

    switches: the variables that turn it on (1) or off (0), g4debug's own first. purpose:
    correctness, performance or experiment.
    """

    id: str
    title: str
    state: str
    why: str
    switches: list[str]
    seed: str
    upstream: str
    purpose: str


def render(rows: Sequence[Row], head: Sequence[str], console: Console) -> None:
    """Print a table that fits the console. ``head``: lines on the SGLang and on G4DEBUG_FIXES.

    A switch has a line of its own, so that it can be copied from a narrow terminal, too.
    """
    for line in cleaned(head):
        console.print(Text(line, "dim"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in cleaned(rows):
        what = Text(row.title).append(f"\n{row.why}", "dim")
        for switch in row.switches:
            what.append(f"\n{switch}", "cyan")
        what.append(f"\nseed: {row.seed}; upstream: {row.upstream}", "dim")
        state = Text(row.state, STYLES.get(row.state, ""))
        table.add_row(Text(row.id, "bold"), state, what)
    for segments in console.render_lines(table, pad=False):
        text = Text.assemble(*((s.text, s.style or "") for s in segments))
        text.rstrip()
        console.print(text, no_wrap=True, crop=False)


def render_json(rows: Sequence[Row], stream: IO[str]) -> None:
    """Write a JSON list of objects with the fields of :class:`Row`."""
    json.write(rows, stream)
