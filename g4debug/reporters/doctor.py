"""The result of ``g4debug doctor`` on a terminal: the verdict, the facts, and the verdict again.

The short form counts what is as it should be, and shows in full only what is not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.reporters import json
from g4debug.reporters.text import cleaned, hang

LABEL = 11
STYLES = {
    "wrapped": "green",
    "applied": "green",
    "armed": "green",
    "judged": "green",
    "run": "green",
    "refused": "yellow",
    "not judged": "yellow",
    "caught": "green",
    "missing": "bold red",
    "target-missing": "bold red",
    "FAILED": "bold red",
    "EXCLUDES g4debug": "bold red",
    "left out": "yellow",
    "outside": "yellow",
    "instead": "bold red",
    "off": "yellow",
    "opt-in": "yellow",
}
# States that nobody needs to look into: in the short form these rows are only counted.
QUIET = {
    *("wrapped", "found", "absent", "applied", "not-needed", "off"),
    *("armed", "opt-in", "judged", "run", "caught"),
}
FEW = 9  # so many names of one state are listed in the short form


@dataclass(frozen=True)
class Row:
    """One thing that was checked. state: one word. detail: the rest, or ''."""

    name: str
    state: str
    detail: str = ""


@dataclass
class Diagnosis:
    """problems: requests that cannot be met. notes: facts that are worth knowing.

    The sections hold rows. If a section could not be checked, ``unchecked`` has the reason.
    """

    problems: list[str] = field(default_factory=list)
    viewer: bool = False  # without SGLang dumps can be opened, but nothing can be served
    works: list[str] = field(default_factory=list)  # without SGLang: the commands that work
    notes: list[str] = field(default_factory=list)
    headline: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    plugin: list[Row] = field(default_factory=list)
    environment: list[Row] = field(default_factory=list)
    dumps: str = ""
    where: str = ""  # where the sites were checked
    sites: list[Row] = field(default_factory=list)
    shared: list[Row] = field(default_factory=list)  # sites where somebody else's hook is, too
    fixes: list[Row] = field(default_factory=list)
    tracers: list[Row] = field(default_factory=list)
    backends: list[Row] = field(default_factory=list)  # attention backends, for page-table
    models: list[Row] = field(default_factory=list)  # what was run with which of them
    canary: list[Row] = field(default_factory=list)
    faults: list[Row] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return not self.problems and not self.viewer

    def conclude(self, otherwise: str) -> None:
        """Set the headline: the first problem, or ``otherwise``."""
        self.headline = f"not ready: {self.problems[0]}" if self.problems else otherwise


def render_json(diagnosis: Diagnosis, stream: IO[str]) -> None:
    """Write one JSON object: ``ready`` and the fields of :class:`Diagnosis`."""
    json.write({"ready": diagnosis.ready, **vars(diagnosis)}, stream)


def render(
    diagnosis: Diagnosis, console: Console, *, everything: bool = True, again: str = ""
) -> None:
    """Print the report, at most the console's width wide.

    everything: every row of every section; without it, rows in a quiet state are counted. again:
    the command that shows every row, for the last lines of the short form.
    """
    d = cleaned(diagnosis)
    verdict = Text(d.headline, "bold green" if d.ready else "bold white on red")
    hang(console, verdict)
    for problem in d.problems[1:]:
        _entry(console, "ALSO", Text(problem, "bold red"))
    for note in d.notes:
        _entry(console, "NOTE", Text(note, "yellow"))
    console.print()
    _entry(console, "VERSIONS", Text(" · ".join(f"{k} {v}" for k, v in d.versions.items())))
    _entry(console, "GPU", *map(Text, d.gpus or ["none"]))
    _rows(console, "PLUGIN", d.plugin, "")
    _rows(console, "SETTINGS", d.environment, "")
    unchecked = "not checked: the problem at the top has to be solved first"
    _entry(console, "DUMPS", Text(d.dumps or unchecked))
    console.print()
    rows = _rows if everything else _counted
    rows(console, "SITES", d.sites, d.unchecked.get("sites", ""), d.where)
    if d.shared:
        rows(console, "SHARED", d.shared, "", "sites where another plugin has a hook, too")
    rows(console, "FIXES", d.fixes, d.unchecked.get("fixes", ""))
    rows(console, "TRACERS", d.tracers, "")
    if d.backends:
        rows(console, "BACKENDS", d.backends, "", "what page-table judges, by attention backend")
    if d.models:
        rows(console, "MODELS", d.models, "", "what a server may run in mode raise or contain")
    rows(console, "CANARY", d.canary, d.unchecked.get("canary", ""))
    rows(console, "FAULTS", d.faults, "")
    if not everything:
        console.print()
        if again:
            _entry(console, "MORE", Text(again, "bold cyan"))
        # The first line may have scrolled away. A short word is not wrapped.
        hang(console, Text("ready", "bold green") if d.ready else verdict)


def _counted(console: Console, label: str, rows: list[Row], unchecked: str, head: str = "") -> None:
    """The section in short: what is quiet is counted, or named where it is few."""
    loud = [row for row in rows if row.state not in QUIET]
    names: dict[str, dict[str, None]] = {}  # state -> the names that are in it, in order
    count: Counter[str] = Counter()
    for row in rows:
        if row.state in QUIET:
            names.setdefault(row.state, {})[row.name] = None
            count[row.state] += 1
    parts = []
    for state, those in names.items():
        part = Text(state, STYLES.get(state, ""))
        few = len(those) <= FEW
        parts.append(part.append(f": {', '.join(those)}" if few else f": {count[state]}", "dim"))
    if parts:
        _entry(console, label, *parts)
        label = ""
    if loud or unchecked or not parts:
        _rows(console, label, loud, unchecked, head if loud else "")


def _rows(console: Console, label: str, rows: list[Row], unchecked: str, head: str = "") -> None:
    """A long row's detail is wrapped within its own column, or below if that is narrow."""
    lines = [Text(head, "dim")] if head else []
    if unchecked:
        lines.append(Text(f"not checked: {unchecked}", "yellow"))
    names = max((len(r.name) for r in rows), default=0)
    states = max((len(r.state) for r in rows), default=0)
    room, left = console.width - LABEL, names + 2 + states + 2
    below = left > room * 2 // 3
    for row in rows:
        line = Text(f"{row.name:<{names}}  ")
        line.append(f"{row.state:<{states}}", STYLES.get(row.state, ""))
        detail = Text(f"  {row.detail}" if row.detail else "", "dim")
        whole = list(Text().append_text(line).append_text(detail).wrap(console, room))
        if len(whole) < 2:
            lines += whole
            continue
        details = list(Text(row.detail, "dim").wrap(console, room - (4 if below else left)))
        if below:
            lines.append(line)
        else:
            lines.append(line.append("  ").append_text(details.pop(0)))
        lines += [Text(" " * (4 if below else left)).append_text(x) for x in details]
    _entry(console, label, *(lines or [Text("none", "dim")]))


def _entry(console: Console, label: str, *values: Text) -> None:
    for value in values:
        hang(console, value, Text(f"{label:<{LABEL}}", "bold"))
        label = ""
