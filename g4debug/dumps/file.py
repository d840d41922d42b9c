"""The name of a dump's file, how a path is printed, and what can be wrong with a file."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

SUFFIX = ".pt"
TEMPORARY = ".tmp"
PREFIX = "g4debug-"
MAX_HOST = 40  # characters of a host's name in a file's name

_NAME = re.compile(
    re.escape(PREFIX) + r"(?P<check>[a-z0-9-]+?)-(?P<time>\d{8}T\d{6}Z)"
    r"(?:-(?P<host>[A-Za-z0-9._-]+?))??"
    r"(?:-dp(?P<dp>\d{1,6}))?(?:-tp(?P<tp>\d{1,6}))?(?:-pp(?P<pp>\d{1,6}))?"
    r"-(?P<pid>\d{1,10})-(?P<number>\d{1,6})(?:-(?P<random>[0-9a-f]{8}))?" + re.escape(SUFFIX),
    re.ASCII,
)


class DumpError(Exception):
    """A dump cannot be written or read. The text says why, in one line."""


class TooLargeError(DumpError):
    """A record has more values than a dump may have. With fewer, it can be written."""


class RefusedError(Exception):
    """A file is not read, for one of the following reasons."""


class DamagedError(RefusedError):
    """A file is not an intact dump. The text says what is wrong."""


class NotADumpError(RefusedError):
    """A file may be intact, but it is not a dump. The text says what it is."""


class NewerError(RefusedError):
    """A dump has a newer schema. The text is the schema's number."""


class CodeError(RefusedError):
    """A file contains something that would run code or build an object."""


@dataclass(frozen=True)
class Named:
    """What a file's name says. An unknown number is -1, an unknown text is ''."""

    check: str = ""
    time: str = ""  # ISO 8601, UTC
    host: str = ""
    dp: int = -1
    tp: int = -1
    pp: int = -1
    pid: int = -1
    number: int = -1


def dump_name(
    check: str,
    created: datetime,
    host: str,
    ranks: tuple[int, int, int],
    pid: int,
    number: int,
    random: str,
) -> str:
    """The name of the ``number``-th dump of a process.

    ``g4debug-page-table-20260101T000000Z-node7-tp0-pp0-4711-1-0f3a9c51.pt``. Names sort by check,
    then by time. ranks: (dp, tp, pp), of which an unknown one is -1 and left out. random: eight
    hexadecimal digits, because two containers may have the same host name and the same pids.
    """
    known = "".join(f"-{n}{r}" for n, r in zip(("dp", "tp", "pp"), ranks, strict=True) if r >= 0)
    at = created.astimezone(UTC)
    return (
        f"{PREFIX}{check}-{at:%Y%m%dT%H%M%SZ}-{host_part(host)}{known}"
        f"-{pid}-{number}-{random}{SUFFIX}"
    )


def host_part(host: str) -> str:
    """A host's name as a part of a file's name: without its domain, and at most 40 characters.

    The end is kept, because the names of containers differ there.
    """
    first = host.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9-]+", "_", first)[-MAX_HOST:].strip("-") or "host"


def parse_name(name: str) -> Named | None:
    """What the name of a dump says, also a name that an older g4debug gave. None: no such name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        at = datetime.strptime(found["time"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # the 31st of February
        return None
    dp, tp, pp, pid, number = (
        int(found[n]) if found[n] else -1 for n in ("dp", "tp", "pp", "pid", "number")
    )
    return Named(
        found["check"],
        at.isoformat(timespec="milliseconds"),
        found["host"] or "",
        dp,
        tp,
        pp,
        pid,
        number,
    )


def quoted(path: Path | str) -> str:
    """A path that can be pasted into a shell, and cannot steer a terminal.

    A path with unprintable characters is written as ``$'...'``, which bash, zsh and ksh read.
    """
    text = os.fspath(path)
    if text.startswith("-"):
        text = f"./{text}"  # it would be read as an option
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # Octal, because two hexadecimal digits could run on into the text behind them.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
