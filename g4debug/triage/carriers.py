"""What carried a log, taken off its lines: kubectl, docker, journald, JSON, Slurm, a quote.

Formats that say themselves what they are have a form here. Others put something in front of each
line and no more (stern, srun, ts, pm2, a mail): what stands in front of SGLang's own stamp
``[2026-11-27 06:32:01 TP0]`` in one line is learned, and taken off the others, too.

Lines go in and come out as bytes: a log of gigabytes is mostly lines that have nothing around them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

# SGLang's own: the time, and the ranks with a space in front of each.
STAMP = rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?((?: [A-Z][A-Z_]{1,8}\d+)*)\] "
# Dynamo forms SGLang's lines itself, without the rank.
TRACED = (
    rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d{1,9})?Z +(?:DEBUG|INFO|WARN|ERROR) +[\w.:]{1,120}: "
)
_STAMP = re.compile(STAMP)
_TWICE = re.compile(STAMP + STAMP)
_TRACED = re.compile(TRACED)
_TIME = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)"
_MONTH = rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?"
_PROGRAM = rb"[\w.-]{1,60} [\w./@:-]{1,60}\[\d+\]: "
_FORMS = re.compile(
    rb"\[pod/[^\]/]{1,200}/(?P<container>[^\]/]{1,100})\] "
    rb"|\([A-Za-z]\w{0,60} pid=\d+[^)]{0,60}\) "
    rb"|\d{1,4}\|[\w.-]{1,60} *\| "
    rb"|(?P<service>[\w.-]{1,60}) +\| "
    rb"|(?:[A-Z]{4,8} )?" + _TIME + rb"[ \t](?:std(?:out|err) [FP] |" + _PROGRAM + rb")?"
    rb"|" + _MONTH + rb" [\w.-]{1,60} [\w./@-]{1,60}(?:\[\d+\])?: "
)
# The kernel's line keeps its time: it has no other.
KERNEL = re.compile(rb"(?:" + _MONTH + rb"|" + _TIME + rb") [\w.-]{1,60} kernel: ")
_RANK = re.compile(rb"\[?rank\d+\]?: ?")
ANSI = rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"  # colours and such
_ANSI = re.compile(ANSI)
_BORDER = "\u2502".encode()
_DEEPEST = 4  # wrappings in wrappings
_FARTHEST = 200  # bytes in front of a stamp
_LEARNED = 64
_SAYS = re.compile(rb"""["'\r%]|Error|[Ee]xception|CUDA|error: """)  # no wrapper has these
_BEGINS = b"Traceback (most recent call last):"
# Where collectors and Python's JSON formatters put the line itself.
_TEXTS = ("log", "line", "message", "msg", "textPayload", "MESSAGE")
_TIMES = ("asctime", "timestamp", "time", "@timestamp", "ts")
_OURS = ("levelname", "asctime", "funcName", "pathname", "lineno", "logger")  # of Python's logging
_LOGFMT = re.compile(rb'(?:time|ts|t|level)=[^ ].{0,200}? msg="((?:[^"\\]|\\.)*)"')
_CUT = re.compile(rb'"(?:' + "|".join(_TEXTS).encode() + rb')" ?: ?"((?:[^"\\]|\\.)*)')


class Unwrapper:
    """Takes off what is around the lines of one log, and learns on the way.

    containers: the names of the containers that the lines came from, where a carrier has them.
    """

    def __init__(self) -> None:
        self.containers: set[str] = set()
        self._learned: dict[bytes, re.Pattern[bytes]] = {}
        self._last: re.Pattern[bytes] | None = None  # of those that were learned
        self._twice = False  # what stands in front has SGLang's form of the time, too
        self._plain = False  # a line of SGLang's stood at the left margin
        self._column: int | None = None  # of a CSV file
        self._before = b""  # what stood in front of a traceback in the line above

    def lines(self, data: bytes) -> list[bytes]:
        """The lines in a line of the log, without what was around them."""
        # Others put an ISO time in brackets in front: it has a T where SGLang's has a space.
        if data.startswith(b"[2") and data[11:12] == b" ":
            end = data[20:21]
            if end == b" ":  # it has a rank, so it is SGLang's own
                self._plain = True
                return [data]
            if end in (b"]", b"."):
                self._twice = self._twice or _TWICE.match(data) is not None
                if not self._twice:
                    self._plain = True
                    return [data]
                if (found := _STAMP.match(data)) is not None:
                    data = data[found.end() :]
        found = self._last.match(data) if self._last is not None else None
        if found is not None and data.startswith(b"[2", found.end()):  # as most lines are
            return [data[found.end() :]]
        if b"\x1b" in data:
            data = _ANSI.sub(b"", data)
        if _BORDER in data:  # of a terminal's pane, around each line
            data = re.sub(rb"^" + _BORDER + rb" ?|[ \t]*" + _BORDER + rb"\s*$", b"", data)
        return self._inner(data, _DEEPEST)

    def _inner(self, data: bytes, deep: int) -> list[bytes]:
        if not deep or _STAMP.match(data) or _TRACED.match(data) or KERNEL.match(data):
            return [data]
        if data.startswith(b"{") and (inside := self._json(data)) is not None:
            return [one for line in inside for one in self._inner(line, deep - 1)]
        if (found := _LOGFMT.match(data)) is not None and (inside := _text(found[1])):
            return [one for line in inside for one in self._inner(line, deep - 1)]
        if data.startswith(b'"') and (field := self._csv(data)) is not None:
            return self._inner(field, deep - 1)
        if (found := _FORMS.match(data)) is not None:
            if name := found["container"] or found["service"]:
                self.containers.add(re.sub(r"-\d+$", "", name.decode("utf-8", "replace")))
            return self._inner(data[found.end() :], deep - 1)
        return self._front(data, deep)

    def _front(self, data: bytes, deep: int) -> list[bytes]:
        """A line with something unknown in front of it, or with nothing."""
        if (at := data.find(b'{"', 1, _FARTHEST)) > 0 and not _SAYS.search(data[:at]):
            inside = self._json(data[at:])
            if inside and _STAMP.match(inside[0]):  # only SGLang's own teaches
                self._learn(data[:at])
                return inside
        found = _STAMP.search(data, 0, _FARTHEST + 40)
        if found is not None and (front := data[: found.start()]):
            if _RANK.fullmatch(front):
                return [data[len(front) :]]
            if _SAYS.search(front) is not None:  # two lines in one, or a quotation
                return [data] if b'"' in front or b"'" in front else [front, data[len(front) :]]
            self._learn(front)
            return [data[len(front) :]]
        for known in (KERNEL, _TRACED):
            if (found := known.search(data, 0, _FARTHEST + 80)) is not None:
                front = data[: found.start()]
                if not _SAYS.search(front):
                    self._learn(front)
                    return [data[len(front) :]]
        self._traceback(data)
        for form in self._learned.values():
            if (found := form.match(data)) is not None:
                self._last = form
                rest = data[found.end() :]
                return self._inner(rest, deep - 1) if rest.startswith(b"{") else [rest]
        return [data]

    def _traceback(self, data: bytes) -> None:
        """A traceback has no stamp: what stands in front of it stands in front of a frame, too."""
        before, self._before = self._before, b""
        if before and re.match(_form(before) + rb'  File "', data):
            self._learn(before)
        elif (at := data.find(_BEGINS, 0, _FARTHEST + len(_BEGINS))) > 0:
            self._before = b"" if _SAYS.search(data[:at]) else data[:at]

    def _learn(self, front: bytes) -> None:
        blank = not front.strip()
        if blank and self._plain:
            return  # an indented quotation in a log that is not indented
        form = _form(front)
        if form in self._learned:
            return
        if len(self._learned) >= _LEARNED:
            del self._learned[next(iter(self._learned))]
        self._learned[form] = self._last = re.compile(form)
        if (words := re.fullmatch(rb"\S+ ([\w.-]+) ", front)) is not None:  # stern
            self.containers.add(words[1].decode("utf-8", "replace"))

    def _csv(self, data: bytes) -> bytes | None:
        """The field that has the lines; None if this is none of a CSV file's."""
        try:
            row = next(csv.reader([data.decode("utf-8", "replace").rstrip("\r\n")]), [])
        except csv.Error:
            return None
        if self._column is None:
            named = [i for i, x in enumerate(row) if x.lower() in _TEXTS]
            stamped = [i for i, x in enumerate(row) if _STAMP.match(x.encode())]
            if len(row) > 1 and (columns := named or stamped):
                self._column = columns[0]
        if self._column is None or self._column >= len(row):
            return None
        return row[self._column].encode()

    @staticmethod
    def _json(data: bytes) -> list[bytes] | None:
        """The lines in a record; None if it has none. A record that was cut has its beginning."""
        try:
            record = json.loads(data)
        except ValueError:
            if (cut := _CUT.search(data)) is None:
                return None
            return _text(cut[1].rstrip(b"\\")) or None
        inner = record.get("jsonPayload")
        if isinstance(inner, dict):
            record = {**record, **inner}
        texts = [record[key] for key in _TEXTS if isinstance(record.get(key), str)]
        if not texts:
            return None
        found = _split(max(texts, key=len))
        if found and any(key in record for key in _OURS) and not _STAMP.match(found[0]):
            # Python's logging has formed the record: each is a line of SGLang's own.
            found[0] = b"[%s] " % _stamp(record).encode() + found[0]
        return found


def _form(front: bytes) -> bytes:
    """What stands in front of a line, for each number of it any other, of any width."""
    pieces = re.split(rb"( *\d+)", front)
    return b"".join(rb" *\d+" if i % 2 else re.escape(x) for i, x in enumerate(pieces))


def _text(inner: bytes) -> list[bytes]:
    """The lines of a text with escapes, as it stands between quotation marks."""
    try:
        return _split(json.loads(b'"' + inner + b'"'))
    except ValueError:
        return []


def _split(text: str) -> list[bytes]:
    return [line.encode("utf-8", "replace") for line in text.rstrip("\r\n").split("\n")]


NO_TIME = "0001-01-01 00:00:00"


def _stamp(record: Mapping[str, Any]) -> str:
    """The time of a record as SGLang writes it; NO_TIME if it has none."""
    for key in _TIMES:
        said = record.get(key)
        try:
            if isinstance(said, str):
                at = datetime.fromisoformat(said.strip().replace(",", "."))
            elif isinstance(said, int | float) and not isinstance(said, bool):
                at = datetime.fromtimestamp(said if said < 1e11 else said / 1000, UTC)
            else:
                continue
        except (ValueError, OverflowError, OSError):
            continue
        return f"{at:%Y-%m-%d %H:%M:%S}"
    return NO_TIME
