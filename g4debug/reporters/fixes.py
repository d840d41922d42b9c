"""The fixes and their states, one row each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from g4debug.reporters.text import clean

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
    for line in head:
        console.print(Text(clean(line), "dim"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 1, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        what = Text(clean(row.title))
        what.append(f"\n{clean(row.why)}", "dim")
        for switch in row.switches:
            what.append(f"\n{clean(switch)}", "cyan")
        what.append(f"\nseed: {clean(row.seed)}; upstream: {clean(row.upstream)}", "dim")
        state = Text(clean(row.state), STYLES.get(row.state, ""))
        table.add_row(Text(clean(row.id), "bold"), state, what)
    for segments in console.render_lines(table, pad=False):
        text = Text.assemble(*((s.text, s.style or "") for s in segments))
        text.rstrip()
        console.print(text, no_wrap=True, crop=False)


def render_json(rows: Sequence[Row], stream: IO[str]) -> None:
    """Write a JSON list of objects with the fields of :class:`Row`."""
    json.dump([asdict(r) for r in rows], stream, indent=2)
    stream.write("\n")
