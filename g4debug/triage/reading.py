"""Reads a log as a stream, and finds what happened first and not what followed.

A server that dies says so many times: the rank with the error, SGLang's exception, CUDA's line,
the other ranks that lose their peer, NCCL's watchdog, the main process that finds a dead child. A
line that says something is a *mark* with a stage (``patterns.Stage``). Of each start of a server,
the earliest mark of the first stage that explains the rest is its first cause.

Memory is bounded: of each launch so many marks of each stage, and so many launches, are kept.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import BinaryIO

from g4debug.findings.kinds import FindingKind
from g4debug.triage import lines, patterns
from g4debug.triage.lines import KEPT, Line
from g4debug.triage.patterns import ITSELF, PATTERNS, Pattern, Stage
from g4debug.triage.server import Server

MOST_MARKS = 40  # of one stage in one launch
MOST_LAUNCHES = 50
FRAMES = 200  # lines of a traceback
INNERMOST = 6  # of them: the three frames where it was raised
NEAR_SECONDS, NEAR_LINES = 60, 500  # an error is explained by a cause that is told so soon after it
BEFORE_SECONDS = 600  # what was told longer before the end did not end it, a finding excepted

# Only a line with one of these is looked at: a log of gigabytes is mostly others.
_WORDS = (
    "Error|Exception|g4debug|CUDA|cudaE|cuda error|CUBLAS|NCCL|nccl|xit code|Xid|memory|Assertion"
    "|sserted|atchdog|Traceback|  File |server_args=|launch_server|sglang|assert|key = key|SIGTERM"
    "|Gracefully|onnection|crash diagnostics|pool|FORCE_EAGLE|Bidirectional|aborted last|in use"
    "|No space|kernel image|PIECEWISE|cannot be served|OOMKilled|oom-kill|unrecognized|not a valid"
    "|fatal|Fatal|Broken pipe|initialized|out of resource|failed to recv|recvValue|heartbeat|Leak"
    "|swa_tombstone|fallen off|appear to have|fmhaSm100f|page-table|switch fix|so a finding could"
    "|sigquit|SIGQUIT|ECC |transfer failed|handshake failed|bootstrap failed|ERROR|Terminating"
)
TRIGGER = re.compile(_WORDS.encode())
_STATISTICS = (b"] Decode batch", b"] Prefill batch", b" Decode batch,", b' HTTP/1.1" ')
_DIED = re.compile(
    r"(?:Scheduler|Controller|Manager|Router|Worker\w*|ModelRunner) hit an exception: "
    r"|Subprocess \S+ \(pid=\d+\) crashed|scheduler died during initialization|Received sigquit"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Timeout|Failure)\b(?:: .*)?$"
)
# SGLang's main process says so when a child has failed, whatever the child has said.
_CHILD_FAILED = re.compile(r"Received sigquit from a child process|SIGQUIT received\. signum=")
_ERROR = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|[A-Z]\w*(?:Error|Exception))\b")
UNKNOWN = Pattern(("an exception that is not known",), "", 0, Stage.SURFACED)


@dataclass(frozen=True)
class Mark:
    """A line that says something. kind: of the finding that it tells, if it tells one."""

    line: int
    at: datetime | None
    rank: str
    text: str
    pattern: Pattern
    stage: Stage
    kind: FindingKind | None = None
    frame: str = ""  # of an exception: where it was raised


@dataclass
class Launch:
    """One start of a server. died: the line that says so, 0 if none does."""

    begins: int = 1
    server: Server = field(default_factory=Server)
    marks: dict[Stage, list[Mark]] = field(default_factory=dict)
    counts: Counter[Stage] = field(default_factory=Counter)
    dumps: list[str] = field(default_factory=list)
    died: int = 0
    died_at: datetime | None = None

    def add(self, mark: Mark) -> None:
        self.counts[mark.stage] += 1
        of_stage = self.marks.setdefault(mark.stage, [])
        if len(of_stage) < MOST_MARKS:
            of_stage.append(mark)

    @property
    def ended(self) -> bool:
        return bool(self.died or self.counts[Stage.ENDED] or self.counts[Stage.STANDS])

    def all_marks(self) -> list[Mark]:
        return sorted((m for ms in self.marks.values() for m in ms), key=lambda m: m.line)

    def first(self) -> Mark | None:
        """The first cause; None if nothing was told that ends or slows a server."""
        early = [m for m in self.all_marks() if m.stage <= Stage.STANDS and self._counts(m)]
        if early:
            chosen = early[0]
            if chosen.stage != Stage.CAUSE:
                near = [m for m in early[1:] if m.stage == Stage.CAUSE and _near(chosen, m)]
                known = [m for m in early[1:] if m.pattern is not UNKNOWN and _near(chosen, m)]
                if near:
                    return near[0]
                # Which other error of the same moment has a name? Not where ours has one.
                if chosen.pattern is UNKNOWN and known and known[0].rank == chosen.rank:
                    return known[0]
            return chosen
        for stage in (Stage.ENDED, Stage.AFTER):
            if of_stage := self.marks.get(stage):
                return next((m for m in of_stage if m.pattern is not UNKNOWN), of_stage[0])
        signs = self.marks.get(Stage.SIGN, [])
        return min(signs, key=lambda m: (m.pattern.section == ITSELF, m.line), default=None)

    def _counts(self, mark: Mark) -> bool:
        """Whether it may have ended the launch: it was not told, and survived, long before."""
        if mark.kind is not None or mark.at is None or self.died_at is None:
            return True
        return (self.died_at - mark.at).total_seconds() <= BEFORE_SECONDS


def _near(one: Mark, other: Mark) -> bool:
    if one.at is not None and other.at is not None:
        return abs((other.at - one.at).total_seconds()) <= NEAR_SECONDS
    return other.line - one.line <= NEAR_LINES


@dataclass(frozen=True)
class Reading:
    """What a log says. launches: those that are kept, in its order; left_out: how many are not.

    errors: how many lines speak of an error in a form that is not known; error: the first of them.
    """

    launches: tuple[Launch, ...]
    read: int  # lines
    left_out: int = 0
    errors: int = 0
    error: tuple[int, str] = (0, "")  # its number and text

    @property
    def chosen(self) -> Launch:
        """The launch to tell of: the last one that ended by something known, or else that ended."""
        ended = [x for x in self.launches if x.ended]
        known = [x for x in ended if (m := x.first()) is not None and m.pattern.entry]
        told = [x for x in self.launches if x.first() is not None]
        return (known or ended or told or list(self.launches))[-1]


class Reader:
    """Takes the lines of a log one by one."""

    def __init__(self, single: bool = False) -> None:
        self._launches: list[Launch] = [Launch()]
        self._left_out = 0
        self._traceback: deque[str] = deque(maxlen=FRAMES)
        self._recent: deque[str] = deque(maxlen=4)
        self._open = self._fatal = False
        self._raised = Stage.ENDED
        self._at: datetime | None = None
        self._rank = ""
        self._number = 0
        self._single = single
        self._errors, self._error = 0, (0, "")

    def take(self, data: bytes) -> None:
        self._number += 1
        if not self._open and not self._single:
            head = data[:400]  # most of a log are SGLang's statistics, and they accuse nobody
            if any(word in head for word in _STATISTICS) or TRIGGER.search(data) is None:
                return
        line = lines.read(self._number, data)
        if line.quotes:
            return
        if line.prefixed or line.at:
            self._at, self._rank = line.at, line.rank
        elif line.rank:
            self._rank = line.rank
        self._launch(line)
        self._frames(line)
        self._mark(line)
        self._recent.append(line.text[:KEPT])

    def _launch(self, line: Line) -> None:
        launch = self._launches[-1]
        if "server_args=ServerArgs(" in line.text and launch.ended:
            launch = Launch(line.number)
            self._launches.append(launch)
            if len(self._launches) > MOST_LAUNCHES:
                del self._launches[1]
                self._left_out += 1
        launch.server.take(line.text)
        if _DIED.search(line.text) and not launch.died:
            launch.died, launch.died_at = line.number, self._at
        if found := re.match(r" {2}dump: {5}(\S.*)$", line.text):
            launch.dumps[20:] = []
            launch.dumps.append(found[1].strip("'\""))

    def _frames(self, line: Line) -> None:
        if "Traceback (most recent call last)" in line.text:
            if not self._open or line.prefixed:
                self._traceback.clear()
                self._fatal = bool(_DIED.search(line.text)) or not line.prefixed
                self._raised = Stage.SURFACED if _DIED.search(line.text) else Stage.ENDED
            self._open = True
        elif self._open and line.prefixed:
            self._open = False
            self._traceback.clear()
        elif self._open and line.text.strip(" ^~"):
            self._traceback.append(line.text[:KEPT])

    def _mark(self, line: Line) -> None:
        launch = self._launches[-1]
        text = line.text
        kind = patterns.kind_of(text)
        if kind is not None:
            pattern = patterns.of_kind(kind)
            if "_insert_helper" in text and "Wrong answers under load" in kind.see:
                pattern = patterns.of_entry(pattern, 9)
            self._add(launch, line, pattern, kind)
            return
        words: set[str] | None = None
        for pattern in PATTERNS:
            if pattern.regex.search(text) is None or not self._fits(pattern, text):
                continue
            if pattern.server:
                words = launch.server.words() if words is None else words
                if not words.issuperset(pattern.server):
                    continue
            self._add(launch, line, pattern)
            return
        if self._fatal and self._open and len(self._traceback) > 1 and _EXCEPTION.match(text):
            self._add(launch, line, UNKNOWN, stage=self._raised)
        elif _CHILD_FAILED.search(text):
            self._add(launch, line, UNKNOWN, stage=Stage.AFTER)
        elif _ERROR.search(text):
            self._errors += 1
            if self._errors == 1:
                self._error = (line.number, text.strip()[:KEPT])

    def _fits(self, pattern: Pattern, text: str) -> bool:
        if not pattern.frames:
            return True
        context = [*self._traceback, *self._recent, text]
        if pattern.stage == Stage.CAUSE and "block: [" not in pattern.frames:
            if not self._open:
                return False
            context = list(self._traceback)[-INNERMOST - 1 :]
        return any(frame in one for frame in pattern.frames for one in context)

    def _add(
        self,
        launch: Launch,
        line: Line,
        pattern: Pattern,
        kind: FindingKind | None = None,
        stage: Stage | None = None,
    ) -> None:
        frames = [x.strip() for x in self._traceback if x.lstrip().startswith("File ")]
        at = line.at or self._at
        rank = line.rank or self._rank
        where = frames[-1] if frames and self._open and kind is None else ""
        stage = pattern.stage if stage is None else stage
        text = line.text.strip()[:KEPT]
        launch.add(Mark(line.number, at, rank, text, pattern, stage, kind, where))

    def result(self) -> Reading:
        return Reading(
            tuple(self._launches), self._number, self._left_out, self._errors, self._error
        )


def read(stream: BinaryIO) -> Reading:
    """Read a whole log, of any size. Raises OSError as the stream does."""
    return of(lines.raw(stream))


def of(log: Iterable[bytes], single: bool = False) -> Reading:
    """The same of lines. single: they are a line that somebody looks up, and no log."""
    reader = Reader(single)
    for line in log:
        reader.take(line)
    return reader.result()
