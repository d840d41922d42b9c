"""The facts of a dump at a glance: from its file's name, and from its head.

The head is the first record of the zip archive, ``head.json``: a small JSON object with the fields
of :class:`Head`. So it lies at the beginning of the file, and can be read without the rest of it.
It is written from the record and never used in its place. Like everything in a dump, it may come
from a stranger: it is bounded, and its types are checked. Whoever prints it has to clean it. This
module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from g4debug.dumps import check
from g4debug.dumps.errors import DumpError, RefusedError

if TYPE_CHECKING:
    from g4debug.findings.record import TrapRecord

SUFFIX = ".pt"
TEMPORARY = ".tmp"
PREFIX = "g4debug-"
MAX_HOST = 40  # characters of a host's name in a file's name

_NAME = re.compile(
    re.escape(PREFIX) + r"(?P<check>[a-z0-9-]+?)-(?P<time>\d{8}T\d{6}Z)"
    r"(?:-(?P<host>[A-Za-z0-9._-]+?))??"
    r"(?:-dp(?P<dp_rank>\d{1,6}))?(?:-tp(?P<rank>\d{1,6}))?(?:-pp(?P<pp_rank>\d{1,6}))?"
    r"-(?P<pid>\d{1,10})-\d{1,6}(?:-[0-9a-f]{8})?" + re.escape(SUFFIX),
    re.ASCII,
)

END = b"PK\x05\x06"
END_BYTES = 22  # the end of a zip without a comment
RECORD = "head.json"
MAX_HEAD_BYTES = 12 << 10
MAX_HEADLINE = 400  # characters
MAX_TEXT = 64
MAX_READ_BYTES = 64 << 20  # G4DEBUG_MAX_DUMP_MB allows no larger dump
_BEGINNING = MAX_HEAD_BYTES + 256  # the local header of the zip, and the longest head
_LOCAL = struct.Struct("<4s5H3I2H")  # a local file header of a zip
OLD_BEGINNING = 64 << 10  # of the values of a dump without a head


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


@dataclass(frozen=True)
class Head:
    """The facts of a dump that are read at once. An unknown number is -1, an unknown text is ''."""

    schema: int = -1
    check: str = ""  # the tracer's name
    kind: str = ""  # of the finding
    headline: str = ""
    time: str = ""  # ISO 8601, UTC, with milliseconds
    process: str = ""
    host: str = ""
    pid: int = -1
    rank: int = -1  # tensor-parallel rank
    dp_rank: int = -1
    pp_rank: int = -1
    step: int = -1
    launch: str = ""  # the same in all processes of one launch of a server


def of(record: TrapRecord) -> Head:
    """The head of a record."""
    finding = record.finding
    others = {"schema": record.schema, "time": record.created, "launch": record.launch}
    return from_values({**vars(finding.location), **vars(finding), **others})


def encode(head: Head) -> bytes:
    """The head as JSON, at most MAX_HEAD_BYTES long."""
    return json.dumps(dataclasses.asdict(head), ensure_ascii=True).encode("ascii")


def decode(data: bytes) -> Head:
    """The inverse of :func:`encode`, for data from anywhere. Raises ValueError."""
    try:
        values = json.loads(data)
    except RecursionError:
        raise ValueError("its head is nested too deeply") from None
    except ValueError as e:
        raise ValueError(f"its head is not JSON: {e}") from e
    if not isinstance(values, dict):
        raise ValueError("its head is no JSON object")
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> Head:
    """A head from values that may be anything. Unknown names are left out, texts are cut.

    Raises ValueError with the name of a value of the wrong type.
    """
    known: dict[str, Any] = {}
    for field in dataclasses.fields(Head):
        if field.name not in values:
            continue
        value = values[field.name]
        if field.type == "str" and isinstance(value, str):
            limit = MAX_HEADLINE if field.name == "headline" else MAX_TEXT
            known[field.name] = str.__str__(value)[:limit]
        elif field.type == "int" and isinstance(value, int) and not isinstance(value, bool):
            known[field.name] = max(-1, min(int(value), (1 << 63) - 1))
        else:
            raise ValueError(f"its head has no {field.type} as {field.name}")
    known["time"] = utc(known.get("time", ""))
    return Head(**known)


def from_name(name: str) -> Head:
    """The facts in a file's name, also in a name that an older g4debug gave. There may be none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return Head()
    try:
        at = datetime.strptime(found["time"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:  # the 31st of February
        return Head()
    numbers = {n: int(found[n] or -1) for n in ("dp_rank", "rank", "pp_rank", "pid")}
    texts = {"check": found["check"], "time": at.isoformat(), "host": found["host"] or ""}
    return from_values({**texts, **numbers})


def utc(text: str) -> str:
    """An ISO 8601 time, in UTC and with milliseconds; '' if ``text`` is no such time."""
    try:
        time = datetime.fromisoformat(text)
        time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError):
        return ""
    return time.isoformat(timespec="milliseconds")


def read(path: Path) -> Head:
    """The head of a dump, from the beginning of the file alone.

    A dump of an older g4debug has no head; the head is then made from the dump's first values.
    Raises DumpError with one line that gives the reason: the file cannot be read, is no dump, or is
    cut off.
    """
    with opened(path) as (file, size):
        start = file.read(_BEGINNING)
        end = os.pread(file.fileno(), END_BYTES, max(0, size - END_BYTES))
        if not start.startswith(b"PK"):
            raise DumpError(f"{path}: {no_zip(start)}")
        if not end.startswith(END):
            raise DumpError(f"{path}: truncated or damaged: its zip directory is missing")
        try:
            name, at, data = _first_record(start)
            if name == RECORD:
                return decode(data)
        except ValueError as e:
            raise DumpError(f"{path}: truncated or damaged: {e}") from e
        if name != "data.pkl":
            raise DumpError(f"{path}: a zip file, but not a g4debug dump")
        return _without_head(path, os.pread(file.fileno(), OLD_BEGINNING, at))


def _without_head(path: Path, start: bytes) -> Head:
    """The head of an older dump: its first values, if they are in ``start``, or what its name says.

    The finding is the first value of a dump, and the time is the second.
    """
    named = from_name(path.name)
    try:
        values = check.beginning(start, "created")
        finding = values["finding"]
        at = {k: v for k, v in finding["location"].items() if k not in ("check", "kind")}
        return from_values({**at, **finding, "time": values["created"]})
    except (RefusedError, KeyError, TypeError, ValueError, AttributeError):
        return named


def no_zip(beginning: bytes) -> str:
    """A description of a file that does not begin like a zip file."""
    what = "a bare pickle" if beginning.startswith(b"\x80") else "not a torch file"
    return f"not a g4debug dump ({what}); nothing in it was executed"


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """A file that may be a dump, and its size in bytes.

    It is opened without waiting, because a FIFO or a device might hang. Raises DumpError if the
    file cannot be opened, is not a regular file, is empty, or is larger than any dump.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DumpError(f"{path}: not a regular file")
            if status.st_size == 0:
                raise DumpError(f"{path}: empty file")
            if status.st_size > MAX_READ_BYTES:
                raise DumpError(f"{path}: {status.st_size >> 20} MiB; no dump is that large")
            yield file, status.st_size
    except FileNotFoundError:
        raise DumpError(f"{path}: no such file; try: g4debug list") from None
    except IsADirectoryError:
        raise DumpError(f"{path}: is a directory; try: g4debug list {quoted(path)}") from None
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise DumpError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from e


def open_at_once(path: str, flags: int) -> int:
    """An opener for ``open`` that does not wait for somebody at the other end of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _first_record(start: bytes) -> tuple[str, int, bytes]:
    """The first record of a zip archive: name without the top folder, position, contents.

    The contents are empty for any record but the head.
    """
    if len(start) < _LOCAL.size:
        raise ValueError("it ends in its first bytes")
    signature, _, _, method, _, _, crc, stored, size, name_bytes, extra = _LOCAL.unpack_from(start)
    if signature != b"PK\x03\x04":
        raise ValueError("it does not begin with a record")
    at = _LOCAL.size + name_bytes + extra
    name = start[_LOCAL.size : _LOCAL.size + name_bytes].decode("ascii", "replace")
    name = name.partition("/")[2]
    if name != RECORD:
        return name, at, b""
    data = start[at : at + size]
    if method or stored != size or size > MAX_HEAD_BYTES or len(data) != size:
        raise ValueError("its head is cut off or too long")
    if zlib.crc32(data) != crc:
        raise ValueError("the checksum of its head is wrong")
    return name, at, data
