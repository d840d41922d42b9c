"""The lines of a log: bounded, clean, and what each says of its time and its rank.

SGLang's own prefix ``[2026-11-27 06:32:01 DP0 TP1 PP0]`` says when and on which rank; Dynamo has a
prefix of its own. What has carried the log is taken off before (``carriers``). A log is anybody's
text: a line may be endless, may steer a terminal, and may quote what a client has sent.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from typing import BinaryIO, NamedTuple, cast

from g4debug.findings.names import clean
from g4debug.triage import carriers

_PACKED = {b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat", b"PK": "unzip -p"}
LONGEST = 1 << 16  # bytes of a line that are looked at; the rest of it is dropped
KEPT = 500  # characters of a line that are remembered

_PREFIX = re.compile(f"^{carriers.STAMP.decode()}")
_TRACED = re.compile(f"^{carriers.TRACED.decode()}()")
_ACCESS = rb'INFO: +\S+ - "[A-Z]+ (?P<path>[^ ?"]+)[^"]*" (?P<code>\d{3})'
_HEAD = re.compile(
    rb"(?:" + carriers.STAMP + rb"|" + carriers.TRACED + rb")"
    rb"(?:(?P<serves>Decode batch|Prefill batch|The server is fired up)|" + _ACCESS + rb")?"
)
_KERNEL = re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? [\w.-]{1,60} kernel: ")
_KERNEL_ISO = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\S{0,20} [\w.-]{1,60} kernel: ")
_DMESG = re.compile(r"^\[[A-Z][a-z]{2} ([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ")
_UPTIME = re.compile(r"^\[ *\d{1,9}\.\d{6}\] ")  # dmesg without -T
NO_YEAR = 4  # stands for the year that syslog leaves out; it has a 29th of February
_ANSI = re.compile(carriers.ANSI.decode())
_RANK = re.compile(r"^\[?rank(\d+)\]?:(?:\[[EFW]\w*[^\]]{0,60}\] ?)? ?")
# What a client has sent is told behind these, and may go on in the lines below.
CLIENT = r"\[http_server\] Error: |Error in request: |Request \S{1,80} failed: "
# Lines that quote a client, or a request for a page: nothing in them is SGLang's own word.
_QUOTES = re.compile(
    rf"^(?:{CLIENT})"
    r"|GenerateReqInput\(|EmbeddingReqInput\(|(?:Receive|Finish)(?:d)?: (?:obj|rid|request)=?"
    r"|^INFO: +\S+ - \"|Received? (?:chat|request|prompt)\b"
    r"|\b(?:text|prompt|input_ids|messages)=['\"\[]"
    r"|\"(?:text|prompt|input_ids|messages|content)\" ?: ?[\"\[]"
)


@dataclass(frozen=True)
class Line:
    """number: from 1. at: local time of the server, by its own prefix. rank: as ``TP1``, or ''.

    kernel: it is the kernel's. It has no such prefix: its own time is taken, of the year NO_YEAR
    where it has none.
    """

    number: int
    text: str
    at: datetime | None
    rank: str
    prefixed: bool
    quotes: bool
    kernel: bool = False


class CompressedError(ValueError):
    """A log that is compressed in a way that is not read here. The text says what helps."""


def opened(stream: BinaryIO, reader: str = "g4debug triage") -> BinaryIO:
    """The stream as text in UTF-8; gzip's is unpacked. Raises CompressedError.

    reader: the command that reads it unpacked from standard input.
    """
    if not isinstance(stream, BufferedReader):
        return stream
    head = stream.peek(6)[:6]
    if head.startswith(b"\x1f\x8b"):
        return opened(cast("BinaryIO", BufferedReader(gzip.GzipFile(fileobj=stream))), reader)
    if (encoding := _encoding(stream.peek(256)[:256])) is not None:
        return cast("BinaryIO", codecs.EncodedFile(stream, "utf-8", encoding, "replace"))
    for magic, program in _PACKED.items():
        if head.startswith(magic):
            raise CompressedError(
                f"it is compressed; expected a text or gzip: {program} LOG | {reader}"
            )
    return stream


def _encoding(start: bytes) -> str | None:
    """How the text is written that a PowerShell has saved; None if it is not UTF-16."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for first, name in ((0, "utf-16-be"), (1, "utf-16-le")):
        if len(start) >= 8 and start[first::2].count(0) > len(start) * 0.4:
            return name
    return None


def raw(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a stream, cut at LONGEST bytes. Never more than that is held."""
    first = True
    while piece := stream.readline(LONGEST):
        whole = piece.removeprefix(codecs.BOM_UTF8) if first else piece
        first = False
        while not piece.endswith(b"\n") and (piece := stream.readline(LONGEST)):
            pass  # the rest of an endless line
        yield whole


class Head(NamedTuple):
    """What SGLang's own line begins with. serves: it says that the server computes.

    code: of HTTP, if it is a line about a request; 0 if not. path: what was asked for. own: only
    SGLang has this form; others than Dynamo have Dynamo's, too.
    """

    stamp: bytes
    serves: bool
    path: bytes = b""
    code: int = 0
    own: bool = True


def head(data: bytes) -> Head | None:
    """The head of a line that nothing is around; None if it is not SGLang's. Be quick."""
    if data[:1] not in (b"[", b"2") or (found := _HEAD.match(data)) is None:
        return None
    stamp, _, traced, serves, path, code = found.groups()
    number = int(code) if code else 0
    return Head(stamp or traced, serves is not None, path or b"", number, stamp is not None)


def read(number: int, data: bytes) -> Line:
    """A line that nothing is around. Control characters are escaped, colours are dropped."""
    text = data.decode("utf-8", "replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    at, rank = None, ""
    kernel = True
    if (found := _KERNEL.match(text)) is not None:
        at, text = _time(f"{found[1]} {NO_YEAR:04}"), text[found.end() :]
    elif (found := _KERNEL_ISO.match(text)) is not None:
        at, text = _iso(found[1]), text[found.end() :]
    elif (found := _DMESG.match(text)) is not None:
        at, text = _time(found[1]), text[found.end() :]
    else:
        kernel = _UPTIME.match(text) is not None
    prefix = _PREFIX.match(text) or _TRACED.match(text)
    if prefix is not None:
        if (told := _iso(prefix[1])) is None:
            prefix = None
        else:
            at = told
    if prefix is not None:
        rank = prefix[2].strip()
        text = text[prefix.end() :]
    elif (found := _RANK.match(text)) is not None:
        rank = f"rank {found[1]}"
        text = text[found.end() :]
    if at is not None and at.year == 1:  # a record of JSON without a time
        at = None
    text = text.replace("\t", "    ")
    quotes = _QUOTES.search(text) is not None
    return Line(number, clean(text), at, rank, prefix is not None, quotes, kernel)


def _iso(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


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
