"""What triage says of a log, a number or a line: the entry, the facts, and what to run next.

A verdict is one of five: ``entry``; ``elsewhere`` (it is known, and g4debug has no part in it);
``unknown`` (something ended the server, and no entry explains it); ``nothing`` (nothing in it ends
or slows a server); ``foreign`` (it is no log of SGLang). Of words that somebody looks up there are
``several`` (entries that have them), and ``nothing`` means that no entry has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from g4debug.dumps import incidents
from g4debug.dumps.incidents import Dump
from g4debug.triage import lookup
from g4debug.triage.entry import Entry, entries
from g4debug.triage.lookup import Hit
from g4debug.triage.patterns import Stage
from g4debug.triage.reading import Launch, Mark, Reading
from g4debug.triage.server import Server

State = Literal["entry", "elsewhere", "unknown", "nothing", "foreign", "several"]
NEAR = timedelta(minutes=5)  # so long before or after the error a dump belongs to it
SHOWN = 5
CORES = ("*.nvcudmp", "cuda_coredump_*", "core.cuda.*")
OPENS = ("g4debug list", "g4debug show")  # commands that need a dump
# watch and the mode log start on any SGLang, and stop no server; =1 alone may refuse to.
ARM = "SGLANG_TRTLLM_MHA_DEBUG=watch <your launch command>"
ALL = "SGLANG_TRTLLM_MHA_DEBUG=1 "
ONLY_REPORT = "G4DEBUG_MODE=log "
DOCTOR = "g4debug doctor"
HANG = 8
KILL = 26
FAULT = "Fatal Python error"
# abort() in a library: the machine's log does not know why, and the words above it do.
ABORTED = re.compile(rf"{FAULT}|(?:code:? |with )-6\b|\b134\b|ABRT|Aborted")
SGLANGS_CORES = Path("/tmp/sglang_cuda_coredumps")  # where SGLang itself has them written


@dataclass(frozen=True)
class FixSaid:
    """A fix of the entry. state: in force, applies, off, not needed, unknown. why: in words."""

    id: str
    state: str
    why: str


@dataclass(frozen=True)
class Verdict:
    """after: how many marks followed from the first one. earlier, later: the other launches.

    errors, error: as in ``reading.Reading``. survived: what the server said and served on behind,
    where nothing ended it; served: the last line that says so. neighbours: what befell other
    processes of the machine. asked: it is about words that somebody looked up, and about no log;
    hits: the entries that have them, more: and how many more have. why: of what is not known, if
    there is more to say. stacks: the lines of SGLang's own stacks. absent: dumps that the log names
    and this machine has not.
    """

    state: State
    entry: Entry | None = None
    also: tuple[int, ...] = ()
    advice: str = ""
    first: Mark | None = None
    server: Server = field(default_factory=Server)
    after: int = 0
    ranks: tuple[str, ...] = ()
    read: int = 0
    errors: int = 0
    error: tuple[int, str] = (0, "")
    begins: int = 1
    earlier: tuple[tuple[int, str], ...] = ()
    later: tuple[tuple[int, str], ...] = ()
    survived: tuple[Mark, ...] = ()
    served: int = 0
    neighbours: tuple[Mark, ...] = ()
    why: str = ""
    stacks: tuple[int, int] = (0, 0)
    absent: tuple[str, ...] = ()
    asked: bool = False
    hits: tuple[Hit, ...] = ()
    more: int = 0
    fixes: tuple[FixSaid, ...] = ()
    dumps: tuple[Dump, ...] = ()
    cores: tuple[Path, ...] = ()
    next_command: str = ""


def of_entry(number: int) -> Verdict:
    """The verdict for an entry that somebody asks for. Raises KeyError if there is none."""
    found = entries()[number]
    return Verdict("entry", found, next_command=typed(next_of(found, ())))


def of_words(line: Verdict, hits: tuple[Hit, ...]) -> Verdict:
    """The verdict on words that somebody looks up. line: on the same as a line of a log."""
    if line.first is not None:
        also = dict.fromkeys((*line.also, *(hit.entry for hit in hits[: lookup.MOST])))
        own = line.entry.number if line.entry is not None else 0
        return replace(line, asked=True, also=tuple(n for n in also if n not in (0, own)))
    if len(hits) == 1 and not hits[0].where:
        if hits[0].entry:
            return replace(of_entry(hits[0].entry), asked=True)
        return Verdict("elsewhere", advice=hits[0].advice, asked=True)
    shown = hits[: lookup.MOST]
    more = len(hits) - len(shown)
    return Verdict("several" if hits else "nothing", asked=True, hits=shown, more=more)


def of(reading: Reading) -> Verdict:
    """The verdict on a log, without what the environment says."""
    launch = reading.chosen
    first = launch.first()
    others = [x for x in reading.launches if x is not launch]
    marks = [m for m in launch.all_marks() if first is not None and m.line > first.line]
    facts = Verdict(
        state_of(first),
        first=first,
        server=launch.server,
        after=launch.follow(first) if first is not None else 0,
        ranks=tuple(dict.fromkeys(m.rank for m in marks if m.rank and m.stage != Stage.SIGN))[:16],
        read=reading.read,
        errors=reading.errors,
        error=reading.error,
        begins=launch.begins,
        earlier=tuple(_line(x) for x in others if x.begins < launch.begins and x.ended)[-SHOWN:],
        later=tuple(_later(x) for x in others if x.begins > launch.begins)[-SHOWN:],
        served=launch.served,
        neighbours=tuple(launch.neighbours),
        stacks=launch.stacks,
    )
    if reading.foreign and (first is None or first.anybodys or reading.theirs):
        return replace(facts, state="foreign")
    if reading.backwards:
        return replace(facts, state="unknown", why=BACKWARDS, first=None, after=0, ranks=())
    if reading.odd > reading.headed and (first is None or first.kind is None):
        return replace(facts, state="unknown", why=ODD.format(line=reading.at))
    if first is None:
        return replace(facts, survived=tuple(m for m in launch.all_marks() if launch.survives(m)))
    entry = entries().get(first.pattern.entry)
    command, why = (first.kind.command if first.kind is not None else "") or ARM, ""
    if entry is not None and entry.number == HANG and not launch.dumps:
        command = _of_hang(launch)
    elif entry is not None and entry.number == KILL and not launch.dumps:
        command = _of_kill(entry, first, bool(launch.server.armed))
    elif entry is not None and (first.kind is None or launch.dumps):
        command = next_of(entry, launch.dumps, armed=bool(launch.server.armed))
    elif facts.state == "unknown" and launch.never_served:
        command, why = DOCTOR, AT_START
    return replace(
        facts,
        entry=entry,
        also=first.pattern.also if entry is not None else (),
        advice=first.pattern.advice,
        why=why,
        next_command="" if facts.state == "elsewhere" else typed(command),
    )


ODD = (
    "Most of what SGLang says here has a form that triage does not know, first in line {line}: "
    "something has changed the lines. So nothing is blamed. Give the log as the server wrote it "
    "(kubectl logs, docker logs, or the file)."
)
BACKWARDS = (
    "The times of this log go back from line to line: whoever exported it has put the newest line "
    "first. What followed would be taken for the cause, so nothing is blamed. Turn it round: "
    "tac LOG | g4debug triage"
)
AT_START = (
    "It ended before it served, so there was nothing to trace yet: its own words are the lead. "
    "g4debug doctor looks at this environment."
)


def _of_hang(launch: Launch) -> str:
    """What to type about a server that stands: by now it may be dead, or have no g4debug."""
    killed = any(m.stage == Stage.STANDS and "soft=True" not in m.text for m in launch.all_marks())
    if launch.died or (killed and launch.ended and not launch.server.armed):
        return ARM
    if launch.server.armed:
        return "g4debug doctor --pid <pid of the server>"
    return "py-spy dump --native --pid <pid of the scheduler>"


def _of_kill(entry: Entry, first: Mark, armed: bool) -> str:
    """What to type about a process that was killed, or died in a library."""
    if ABORTED.search(first.text) and not armed:
        return next((c for c in entry.commands if FAULT in c), ARM)
    return next_of(entry, (), armed)


def state_of(first: Mark | None) -> State:
    if first is None:
        return "nothing"
    if first.pattern.entry:
        return "entry"
    return "elsewhere" if first.pattern.advice else "unknown"


def _line(launch: Launch) -> tuple[int, str]:
    """An earlier launch that ended: its first line, and what ended it."""
    first = launch.first()
    if first is None:
        return launch.begins, "not known"
    return launch.begins, f"entry {first.pattern.entry}" if first.pattern.entry else first.text


def _later(launch: Launch) -> tuple[int, str]:
    """A launch behind the one that is told: its first line, and whether it serves."""
    served = f"it serves in line {launch.served}" if launch.served else "it has not served yet"
    return launch.begins, served


def next_of(entry: Entry, dumps: Sequence[str], armed: bool = True) -> str:
    """The command to type next: the dump that the log names, or the entry's first command.

    armed: the server had g4debug in it. If not it has left no dump, and there is none to open.
    """
    if dumps:
        return show(dumps[0])
    useful = [c for c in entry.commands if armed or not c.startswith(OPENS)]
    return starting(useful[0]) if useful else ARM


def starting(command: str) -> str:
    """A command that arms, as it starts on any SGLang, and stops no server."""
    if command.startswith(ALL) and "G4DEBUG_MODE=" not in command:
        return ALL + ONLY_REPORT + command.removeprefix(ALL)
    return command


def show(dump: str | Path) -> str:
    from g4debug.dumps.heads import quoted

    return f"g4debug show {quoted(dump)}"


def typed(command: str) -> str:
    """A command of ours as it is typed on this machine."""
    from g4debug.dumps.calling import PROGRAM, program

    if not command.startswith(f"{PROGRAM} "):
        return command
    return program() + command.removeprefix(PROGRAM)


def dumps_of(mark: Mark | None, named: Sequence[str], folder: Path) -> tuple[Dump, ...]:
    """The dumps of that time in a folder, the first finding first, and those that the log names.

    A log has the server's local time, and a dump UTC. The server's zone is not known, so a dump
    counts if it fits in UTC or in the zone of this machine. Raises OSError if the folder cannot be
    read.
    """
    names = {Path(name).name for name in named}
    found = [d for d in incidents.look_into(folder) if d.path.name in names or _fits(mark, d.time)]
    return tuple(sorted(found, key=lambda d: d.time))


def cores_of(mark: Mark | None, folder: Path) -> tuple[Path, ...]:
    """CUDA core dumps of that time in a folder. Raises OSError if it cannot be read."""
    found = []
    for path in sorted(folder.iterdir()):
        if any(path.match(name) for name in CORES):
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
            if _fits(mark, written):
                found.append(path)
    return tuple(found)


def _fits(mark: Mark | None, time: str) -> bool:
    if mark is None or mark.at is None or not time:
        return False
    try:
        made = datetime.fromisoformat(time)
    except ValueError:
        return False
    made = made if made.tzinfo else made.replace(tzinfo=UTC)
    said = (mark.at.replace(tzinfo=UTC), mark.at.astimezone())
    return any(abs(made - one) <= NEAR for one in said)
