"""The dumps of a folder, by incident, the newest incident first.

Each dump takes three lines: when and where, what, and the whole name of its file, so that it can be
copied. On a narrow terminal the first two take more.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from g4debug.dumps.heads import Head, quoted
from g4debug.dumps.incidents import Dump, Incident, seconds_after
from g4debug.findings.names import clean
from g4debug.reporters import json
from g4debug.reporters.text import NOTHING_FOUND, OTHER_RANK, counted, shorten, symbols_for

CHECK_WIDTH = 15  # as long as "flight-recorder"
MANY = 8  # dumps; a command that names more of them is longer than anybody copies
LINES = 3  # of a headline, at most


def render(incidents: Sequence[Incident], console: Console, *, program: str = "g4debug") -> None:
    """Print the list. program: how g4debug is called here; the commands begin with it."""
    more = symbols_for(console.encoding).more
    # Ten thousand calls of print would take longer than all that was read for them.
    text = Text()
    for incident in incidents:
        if text:
            text.append("\n")
        _incident(text, incident, console.width, more, program)
    console.print(text, soft_wrap=True, end="")


def render_json(incidents: Sequence[Incident], stream: IO[str]) -> None:
    """Write a JSON list with one object for each dump, the newest incident first.

    ``incident`` counts the incidents from 1; the first finding of each has ``first`` true. The
    other fields are the fields of :class:`~g4debug.dumps.incidents.Dump` and of its head.
    """
    dumps = [
        _plain(dump) | {"incident": number, "first": dump is incident.first}
        for number, incident in enumerate(incidents, 1)
        for dump in incident.dumps
    ]
    json.write(dumps, stream)


def show_command(incident: Incident, program: str) -> str:
    """The command that shows an incident: all of its dumps by name, the first finding first."""
    return " ".join([program, "show", *(quoted(d.path) for d in incident.dumps)])


def _plain(dump: Dump) -> dict[str, Any]:
    values = asdict(dump.head)
    values.pop("schema")
    path = str(dump.path)
    found = {"path": path, "name": dump.path.name, "size": dump.size, "broken": dump.broken}
    return found | values | {"time": dump.time}


def _incident(text: Text, incident: Incident, width: int, more: str, program: str) -> None:
    several = len(incident.dumps) > 1
    if several:
        hosts = len(incident.hosts)
        text.append(_time(incident.first.time), "bold")
        text.append(
            f"  incident: {len(incident.dumps)} dumps of {counted(incident.processes, 'process')}"
            + (f" on {counted(hosts, 'host')}" if hosts else "")
            + "\n",
            "bold",
        )
    for dump in incident.dumps:
        when = _time(dump.time)
        if several:
            after = f"  +{seconds_after(incident.first, dump):.3f} s"
            when = "  first" if dump is incident.first else after
        _dump(text, dump, f"{when:<19}", width, more)
    if several and len(incident.dumps) <= MANY:
        text.append(f"  show: {show_command(incident, program)}\n", "cyan")


def _dump(text: Text, dump: Dump, when: str, width: int, more: str) -> None:
    check = "BROKEN" if dump.broken else shorten(dump.head.check, CHECK_WIDTH, more)
    tone = "yellow" if dump.broken else "cyan"
    text.append(when).append("  ")
    text.append(f"{check:<{CHECK_WIDTH}}", tone)
    text.append(f"  {_size(dump.size):>5}", "dim")
    where = _where(dump.head)
    if where:
        room = width - 45
        text.append(
            f"  {where}" if len(where) <= room else f"\n  {shorten(where, width - 2, more)}"
        )
    said = shorten(dump.broken or _what(dump.head), LINES * (width - 2), more)
    for line in textwrap.wrap(said, width - 2, max_lines=LINES, placeholder=more):
        text.append(f"\n  {line}", tone)
    text.append(f"\n  {quoted(dump.path.name)}\n", "dim" if dump.broken else "")


def _where(head: Head) -> str:
    """``node7, DP 1, TP 3, pid 4711, step 118``, as far as known."""
    known = (
        (head.host, head.host),
        (head.dp_rank, f"DP {head.dp_rank}"),
        (head.rank, f"TP {head.rank}"),
        (head.pp_rank, f"PP {head.pp_rank}"),
        (head.pid, f"pid {head.pid}"),
        (head.step, f"step {head.step}"),
    )
    return ", ".join(str(words) for value, words in known if value not in (-1, ""))


def _what(head: Head) -> str:
    """The headline without the words that the line above, or the first one, has already."""
    if head.kind == OTHER_RANK:
        return NOTHING_FOUND
    text = head.headline.removeprefix("g4debug: ").removeprefix(head.check).lstrip(": ")
    return text or head.kind or "written by an older g4debug; show tells more"


def _time(iso: str) -> str:
    return clean(iso[:19].replace("T", " "))


def _size(size: int) -> str:
    value = float(size)
    for unit in ("B", "K", "M"):
        if value < 1000:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 10 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}G"
