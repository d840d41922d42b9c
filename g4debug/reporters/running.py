"""The result of ``g4debug doctor --pid`` for a running server: one block for each process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from g4debug.findings.status import TAPE, TracerStatus
from g4debug.reporters import json
from g4debug.reporters.text import cleaned, counted, hang

TITLE = 60
STOPPED = "the process is stopped (by a signal, or by a debugger)"
RECORDS = ("flight-recorder",)  # it keeps what happened, and never checks anything


@dataclass
class Process:
    """One process.

    problem: why it has no status, or why that cannot be read; '' if it has one. expected: it should
    have one. age: seconds since it last told its status. stuck: it should have done so by now.
    stopped: it cannot, because the process does not run at all (``STOPPED``).
    """

    pid: int
    title: str = ""
    asked: bool = False  # the user named this process
    python: bool = True  # it runs a Python, or that cannot be seen
    has_status: bool = False
    problem: str = ""
    expected: bool = False
    role: str = ""
    rank: str = ""
    serves: str = ""  # its model, attention backends and draft, in words
    phase: str = ""
    step: int = -1
    age: float = -1.0
    stuck: bool = False
    stopped: bool = False
    about: dict[str, str] = field(default_factory=dict)
    tracers: tuple[TracerStatus, ...] = ()
    stands: str = ""  # that it serves nobody; '' if not
    waits: tuple[str, ...] = ()  # requests that wait, since when and why
    warnings: tuple[str, ...] = ()  # what the server does on purpose, and says once or never

    @property
    def foreign(self) -> bool:
        """True for a shell or another program, which cannot have a status."""
        return not (self.python or self.asked or self.has_status or self.expected)

    @property
    def worries(self) -> list[str]:
        """The facts to know first; empty if all is well."""
        if not self.has_status:
            return [self.problem] if self.expected else []
        found = []
        if self.stuck:
            found.append(
                f"{STOPPED}, and has told nothing for {self.age:.0f} s"
                if self.stopped
                else f"the event loop told nothing for {self.age:.0f} s: it is stuck"
            )
        if self.stands:
            found.append(self.stands)
        # What the tape cannot carry keeps no tracer from its work.
        judging = (t for t in self.tracers if t.name != TAPE)
        return found + [f"{t.name} is {t.state}" for t in judging if not t.sound]


@dataclass
class Server:
    pid: int
    processes: list[Process]

    @property
    def schedulers(self) -> list[Process]:
        return [p for p in self.processes if p.has_status and p.role == "scheduler"]

    @property
    def worries(self) -> list[tuple[int, str]]:
        """(pid, what) of everything that is not as it should be."""
        # A named process that is not part of SGLang (a shell, a supervisor) needs no status.
        judged = (p for p in self.processes if p.has_status or not (p.asked and self.schedulers))
        return [(p.pid, worry) for p in judged for worry in p.worries]

    @property
    def sound(self) -> bool:
        return bool(self.schedulers) and not self.worries

    @property
    def headline(self) -> str:
        count = len(self.schedulers)
        many = f"{counted(count, 'scheduler')} of process {self.pid}"
        if not count:
            return f"process {self.pid} and its children: no scheduler shows a status"
        if self.worries:
            pid, worry = self.worries[0]
            return f"{many}: not all is judged: pid {pid}: {worry}"
        return f"{many}: every tracer that is armed judges all it can"


def render_json(server: Server, stream: IO[str]) -> None:
    """Write one JSON object: ``sound``, ``headline``, and the fields of :class:`Server`."""
    json.write({"sound": server.sound, "headline": server.headline, **vars(server)}, stream)


def render(server: Server, console: Console) -> None:
    """Print the report, at most the console's width wide."""
    server = cleaned(server)
    hang(console, Text(server.headline, "bold green" if server.sound else "bold white on red"))
    shown = [p for p in server.processes if not p.foreign]
    for process in shown:
        console.print()
        kind = " ".join(x for x in (process.role, process.rank) if x)
        title = f"pid {process.pid}  {kind or process.title[:TITLE] or 'no title'}"
        hang(console, Text(title, "bold"))
        for line in _lines(process):
            hang(console, line, "  ")
    others = len(server.processes) - len(shown)
    if others:
        console.print()
        verb = "is" if others == 1 else "are"
        more = f"and {counted(others, 'more process')}, which {verb} no Python"
        hang(console, Text(more, "dim"))


def _lines(process: Process) -> Iterator[Text]:
    if not process.has_status:
        yield Text(process.problem, "yellow" if process.expected else "dim")
        return
    yield Text(", ".join(f"{k} {v}" for k, v in process.about.items()), "dim")
    if process.role != "scheduler":
        yield Text("runs no scheduler; the tracers work in the schedulers")
        return
    if process.serves:
        yield Text(f"runs {process.serves}")
    when = f"step {process.step}, {process.phase}, told {process.age:.0f} s ago"
    if process.stuck:
        what = STOPPED if process.stopped else "the event loop is stuck"
        yield Text(f"{when}: {what}, what follows is from before", "bold red")
    else:
        yield Text(when)
    yield from (Text(f"warning: {line}", "yellow") for line in process.warnings)
    yield from (Text(line, "yellow") for line in process.waits)
    width = max((len(t.name) for t in process.tracers), default=0)
    for tracer in process.tracers:
        text = Text(f"{tracer.name:<{width}}  ")
        yield text.append(tracer.state, "green" if tracer.sound else "yellow")
        for said in _counts(tracer):
            yield Text(f"{'':<{width}}  {said}", "dim")


def _counts(tracer: TracerStatus) -> Iterator[str]:
    if tracer.checked:
        last = max(c.step for c in tracer.checked)
        counts = ", ".join(f"{c.count} {c.what}" for c in tracer.checked)
        yield f"checked {counts} (last in step {last})"
    elif tracer.name in RECORDS:
        yield "records; it has nothing to check"
    elif tracer.mode:
        yield "has checked nothing yet"
    if tracer.findings:
        yield "findings: " + ", ".join(f"{n} {kind}" for kind, n in tracer.findings.items())
    if tracer.audited >= 0 and not tracer.dead:
        yield f"hooks looked at in step {tracer.audited}: all run"
