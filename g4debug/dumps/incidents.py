"""Which dumps belong together: dumps of one launch of a server, written within seconds.

When a server of several ranks goes down, several of them leave dumps, on several hosts. Only heads
are read here (:mod:`g4debug.dumps.heads`), so that ten thousand dumps are looked at in seconds.
This module does not import torch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from g4debug.dumps import heads
from g4debug.dumps.errors import DumpError
from g4debug.dumps.heads import SUFFIX, Head

TOGETHER_SECONDS = 30.0  # a dump this long after the last one of its launch begins a new incident


@dataclass(frozen=True)
class Dump:
    """A file that should be a dump, as far as its head tells.

    size: bytes. time: ISO 8601 in UTC, when the finding was made; of a file that does not say
    when, the time when it was written; '' if there is no such file. broken: why it cannot be read,
    or ''; then the head holds what the file's name says.
    """

    path: Path
    size: int
    time: str
    head: Head
    broken: str = ""


@dataclass(frozen=True)
class Incident:
    """Dumps that belong together, the first finding first."""

    dumps: tuple[Dump, ...]

    @property
    def first(self) -> Dump:
        return self.dumps[0]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that wrote them, in the order of their first dumps."""
        return tuple(dict.fromkeys(d.head.host for d in self.dumps if d.head.host))

    @property
    def processes(self) -> int:
        """How many processes wrote them."""
        return len({(d.head.host, d.head.pid) for d in self.dumps})


def look(path: Path) -> Dump:
    """The facts of a file at a glance. A broken file has the reason; nothing is raised."""
    size, written = _stat(path)
    try:
        head = heads.read(path)
    except DumpError as e:
        head, broken = heads.from_name(path.name), str(e).removeprefix(f"{path}: ")
        return Dump(path, size, head.time or written, head, broken)
    return Dump(path, size, head.time or written, head)


def look_into(folder: Path) -> list[Dump]:
    """All files of a folder with the ending of a dump, in no order.

    Raises OSError, or ValueError for a NUL in the name, if the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.endswith(SUFFIX) and e.name[0] != "."]
    return [look(folder / name) for name in names]


def group(dumps: Iterable[Dump]) -> list[Incident]:
    """The incidents, the newest first, and in each the dumps by time, then by step.

    The dumps of one launch belong together if each comes at most TOGETHER_SECONDS after the one
    before it. Hosts' clocks may differ by more than the ranks do, so who was first on another host
    is as true as their clocks. A dump of an older version does not name its launch; it belongs to
    the other dumps of the same process. A broken one stands alone.
    """
    launches: dict[Hashable, list[Dump]] = {}
    for number, dump in enumerate(dumps):
        head = dump.head
        key: Hashable = head.launch or (head.host, head.pid)
        if dump.broken or (not head.launch and head.pid < 0):
            key = number
        launches.setdefault(key, []).append(dump)
    found: list[list[Dump]] = []
    for together in launches.values():
        together.sort(key=_order)
        found.append([together[0]])
        for before, dump in itertools.pairwise(together):
            if _moment(dump) - _moment(before) > TOGETHER_SECONDS:
                found.append([])
            found[-1].append(dump)
    found.sort(key=lambda dumps: _order(dumps[0]), reverse=True)
    return [Incident(tuple(dumps)) for dumps in found]


def seconds_after(first: Dump, dump: Dump) -> float:
    """How long after the first one a dump was made; 0 if that is not known."""
    known = bool(first.time and dump.time)
    return max(0.0, _moment(dump) - _moment(first)) if known else 0.0


def _order(dump: Dump) -> tuple[str, int, str]:
    return dump.time, dump.head.step, dump.path.name


def _moment(dump: Dump) -> float:
    return datetime.fromisoformat(dump.time).timestamp() if dump.time else 0.0


def _stat(path: Path) -> tuple[int, str]:
    """The file's size and the time when it was written.

    They are 0 and '' for a file that has gone, or for a link to a file that does not exist.
    """
    try:
        status = path.stat()
        written = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds")
    except (OSError, ValueError, OverflowError):
        return 0, ""
    return status.st_size, written
