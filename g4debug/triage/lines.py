"""The lines of a log, whatever has carried it: bounded, clean, and without what wrapped them.

SGLang's own prefix ``[2026-11-27 06:32:01 DP0 TP1 PP0]`` says when and on which rank. Around it
there may be the words of kubectl, docker, journald, a cloud or Ray; Dynamo has a prefix of its own.
A log is anybody's text: a line may be endless, may steer a terminal, and may quote what a client
has sent.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from typing import BinaryIO, cast

from g4debug.findings.names import clean

_PACKED = {b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"PK": "unzip -p"}
LONGEST = 1 << 16  # bytes of a line that are looked at; the rest of it is dropped
KEPT = 500  # characters of a line that are remembered

_CARRIER = (
    r"(?:\[pod/[^\]]{1,200}\] |\([A-Za-z]\w{0,60} pid=\d+[^)]{0,60}\) |[\w.-]{1,60} +\| "
    r"|(?:[A-Z]{4,8} )?\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d)[ \t]"
    r"(?:std(?:out|err) [FP] )?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,60} [\w./@-]{1,60}(?:\[\d+\])?: )"
)
_CARRIERS = re.compile(f"^{_CARRIER}")
_STAMP = r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?"
_RANKS = r"(?: [A-Z][A-Z_]{1,8}\d+)*"  # as DP0 ATTN_CP1 TP1
_PREFIX = re.compile(rf"^{_STAMP}({_RANKS})\] ")
# Dynamo's: it forms SGLang's lines itself, without the rank.
_TRACING = (
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?Z +(?:DEBUG|INFO|WARN|ERROR) +[\w.:]{1,120}: "
)
_TRACED = re.compile(f"^{_TRACING}()")
_SERVES = "(Decode batch|Prefill batch|The server is fired up)?"
_PLAIN = re.compile(rf"{_STAMP}{_RANKS}\] {_SERVES}".encode())
_WRAPPED = rf'(?:\{{"log":")?(?:\x1b\[[\d;]*m)?{_CARRIER}{{0,3}}'
_CARRIED = re.compile(rf"{_WRAPPED}(?:{_STAMP}{_RANKS}\] |{_TRACING}){_SERVES}".encode())
_KERNEL = re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) [\w.-]{1,60} kernel: ")
_DMESG = re.compile(r"^\[[A-Z][a-z]{2} ([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ")
NO_YEAR = 4  # stands for the year that syslog leaves out; it has a 29th of February
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RANK = re.compile(r"^\[?rank(\d+)\]?:(?:\[[EFW]\w*[^\]]{0,60}\] ?)? ?")
# Lines that quote a client, or a request for a page: nothing in them is SGLang's own word.
_QUOTES = re.compile(
    r"GenerateReqInput\(|EmbeddingReqInput\(|(?:Receive|Finish)(?:d)?: (?:obj|rid|request)=?"
    r"|^INFO: +\S+ - \"|Received? (?:chat|request|prompt)\b"
    r"|\b(?:text|prompt|input_ids|messages)=['\"\[]"
    r"|\"(?:text|prompt|input_ids|messages|content)\" ?: ?[\"\[]"
)


@dataclass(frozen=True)
class Line:
    """number: from 1. at: local time of the server, by its own prefix. rank: as ``TP1``, or ''.

    A line of the kernel has no such prefix: its own time is taken, of the year NO_YEAR where it
    has none.
    """

    number: int
    text: str
    at: datetime | None
    rank: str
    prefixed: bool
    quotes: bool


class CompressedError(ValueError):
    """A log that is compressed in a way that is not read here. The text says what helps."""


def opened(stream: BinaryIO) -> BinaryIO:
    """The stream, unpacked if it is gzip's. Raises CompressedError."""
    if not isinstance(stream, BufferedReader):
        return stream
    head = stream.peek(6)[:6]
    if head.startswith(b"\x1f\x8b"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream))
    for magic, program in _PACKED.items():
        if head.startswith(magic):
            raise CompressedError(
                f"it is compressed; expected a text or gzip: {program} LOG | g4debug triage"
            )
    return stream


def raw(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a stream, cut at LONGEST bytes. Never more than that is held."""
    while piece := stream.readline(LONGEST):
        whole = piece
        while not piece.endswith(b"\n") and (piece := stream.readline(LONGEST)):
            pass  # the rest of an endless line
        yield whole


def head(data: bytes) -> tuple[bytes, bool] | None:
    """The time of a line, and whether it says that the server serves. Of each line: be quick."""
    if data.startswith(b"[2"):
        found = _PLAIN.match(data)
        return (found[1], found[2] is not None) if found is not None else None
    found = _CARRIED.match(data)
    return (found[1] or found[2], found[3] is not None) if found is not None else None


def read(number: int, data: bytes) -> Line:
    """A line without its wrapping. Control characters are escaped, colours are dropped."""
    text = data.decode("utf-8", "replace").rstrip("\r\n")
    if text.startswith('{"log":'):
        text = _docker(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    at, rank = None, ""
    for _ in range(3):
        if (found := _KERNEL.match(text)) is not None:
            at = _time(f"{found[1]} {NO_YEAR:04}")
        if _TRACED.match(text) or (found := _CARRIERS.match(text)) is None:
            break
        text = text[found.end() :]
    if (found := _DMESG.match(text)) is not None:
        at, text = _time(found[1]), text[found.end() :]
    prefix = _PREFIX.match(text) or _TRACED.match(text)
    if prefix is not None:
        try:
            at = datetime.fromisoformat(prefix[1])
        except ValueError:
            prefix = None
    if prefix is not None:
        rank = prefix[2].strip()
        text = text[prefix.end() :]
    elif (found := _RANK.match(text)) is not None:
        rank = f"rank {found[1]}"
        text = text[found.end() :]
    text = text.replace("\t", "    ")
    return Line(number, clean(text), at, rank, prefix is not None, _QUOTES.search(text) is not None)


def _time(text: str) -> datetime | None:
    """The time of syslog or dmesg."""
    try:
        return datetime.strptime(text, "%b %d %H:%M:%S %Y")
    except ValueError:
        return None


def dated(at: datetime, near: datetime) -> datetime:
    """A time with the year that syslog leaves out: the one that brings it nearest to another."""
    if at.year != NO_YEAR:
        return at
    found = []
    for year in (near.year - 1, near.year, near.year + 1):
        try:
            found.append(at.replace(year=year))
        except ValueError:
            continue  # a 29th of February
    return min(found, key=lambda one: abs(one - near)) if found else near


def _docker(text: str) -> str:
    """A line of docker's json-file; as it is if it is none, or was cut."""
    try:
        inner = json.loads(text)["log"]
    except (ValueError, KeyError, TypeError):
        return text
    return inner.rstrip("\r\n") if isinstance(inner, str) else text
