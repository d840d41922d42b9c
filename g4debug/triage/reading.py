"""Reads a log as a stream, and finds what happened first and not what followed.

A server that dies says so many times: the rank with the error, SGLang's exception, CUDA's line,
the other ranks that lose their peer, NCCL's watchdog, the main process that finds a dead child. A
line that says something is a *mark* with a stage (``patterns.Stage``). Of each start of a server,
the earliest mark of the first stage that explains the rest is its first cause.

A server also says such things and lives: it quotes a client, tries another port, catches an
exception. So a mark behind which the server served on did not end it. Findings of g4debug are
excepted: they are true of a server that lives, too.

Memory is bounded: of each launch so many marks of each stage, and so many launches, are kept.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import BinaryIO

from g4debug.findings.kinds import FindingKind
from g4debug.triage import carriers, lines, neighbours, patterns
from g4debug.triage.lines import KEPT, Head, Line
from g4debug.triage.load import Load
from g4debug.triage.patterns import (
    CLUSTER,
    GRACE,
    HEALTH,
    ITSELF,
    KILLED,
    NETWORK,
    OTHER,
    OUTSIDE,
    PATTERNS,
    PROBE,
    RETRACTS,
    ROUTER,
    SIGTERM,
    Pattern,
    Stage,
)
from g4debug.triage.server import Server
from g4debug.triage.sieve import TRIGGER

MOST_MARKS = 40  # of one stage in one launch
MOST_LAUNCHES = 50
FRAMES = 200  # lines of a traceback
INNERMOST = 6  # of them: the three frames where it was raised
NEAR_SECONDS, NEAR_LINES = 60, 500  # an error is explained by a cause that is told so soon after it
BEFORE_SECONDS = 600  # what was told longer before the end did not end it, a finding excepted
SERVED_SECONDS = 10  # other ranks may serve so long when CUDA has failed on one
# The main process may answer so long when a scheduler has died: SGLang waits for core dumps.
ANSWERED_SECONDS = 90
STRANGE = 2  # so many lines that are no error are a log, and no error that was copied
LEAST_BACK, MOSTLY = 2, 3  # logs of several servers go back, too, but not so often
HANDLED_LINES = 3  # of a message above the traceback that is logged with it

# Of SGLang alone: where none of these is in a log, it is of something else.
_OURS = re.compile(
    rb"server_args=|launch_server|sglang[./:]|sglang serve|SGLANG_|SGLang|g4debug[: ]"
    rb"|\bsmg::|\bsglang_router|- \"POST /generate HTTP/1\.\d\" \d{3} [A-Z]|Decode batch, #"
    rb"|Prefill batch, #|The server is fired up|Scheduler hit an exception|crashed with exit code -"
    rb"|sigquit from a child|SIGQUIT received\. signum="
)
_FETCHED = re.compile(
    rb"^ *(?:Collecting|Downloading|Requirement already|Using cached|Successfully) "
)
_THEIRS = re.compile(
    rb"\bvllm\b|vLLM|TensorRT-LLM|TRT-LLM|torch/distributed/(?:run\.py|elastic)|\bollama\b"
    rb"|\bggml|text_generation_launcher|\blmdeploy\b|\btritonserver\b"
)
# Of SGLang's own lines; in a line without SGLang's head they say that its form is not known.
_SAID = re.compile(
    rb"Decode batch, #|Prefill batch, #|The server is fired up|Load weight begin|server_args="
)
_STARTS = re.compile(r"[^'\"]{0,120}server_args=(?:ServerArgs\(|\{)")  # a dict since 0.5.23
_STATISTICS = (b"] Decode batch", b"] Prefill batch", b" Decode batch,", b' HTTP/1.1" ')
_CLIENT = re.compile(lines.CLIENT)
_DIED = re.compile(
    r"(?:Scheduler|Controller|Manager|Router|Worker\w*|ModelRunner) hit an exception: "
    r"|Subprocess \S+ \(pid=\d+\) crashed|scheduler died during initialization|Received sigquit"
    r"|SIGQUIT received\. signum=|Scheduler or DataParallelController \d+ terminated with (?!0\b)"
    r"|Dumping requests before crash"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Timeout|Failure)\b(?:: .*)?$"
)
# The main process says so when a child has failed, or the first request, whatever was said before.
_CHILD_FAILED = re.compile(
    r"Received sigquit from a child process|SIGQUIT received\. signum="
    r"|Subprocess \S+ \(pid=\d+\) crashed|Initialization failed\. warmup error: "
)
_ERROR = re.compile(r"\b(?:ERROR|FATAL|CRITICAL|[A-Z]\w*(?:Error|Exception))\b")
# What a logger says above the traceback of an exception that was caught.
_HANDLED = re.compile(rb"ERROR|[Ee]rror|xception|[Ff]ailed")
_ABORTED = re.compile(r"exit code -6\b|exit code: -6\b|Fatal Python error: Aborted")
_SIGKILL = re.compile(
    r"(?:exit code:?|terminated with) -9\b|^Killed$|with code 137\b|xit ?Code\"?: +137\b|=9/KILL"
    r"|terminated by SIGKILL|on signal 9|exitcode=9\b"
)
_OF_POD = re.compile(r"OOMKilled|[Ee]xit ?Code:")  # as kubectl says it of a container
UNKNOWN = Pattern(("an exception that is not known",), "", 0, Stage.SURFACED)


@dataclass
class Mark:
    """A line that says something. kind: of the finding that it tells, if it tells one.

    at: the line's own time; or else of the traceback that it is in, or of the next line that has
    one. since: the last time that was told above it. block: the line where its traceback begins,
    0 if it is in none. raised: in a traceback that nobody was seen to catch.
    """

    line: int
    at: datetime | None
    rank: str
    text: str
    pattern: Pattern
    stage: Stage
    kind: FindingKind | None = None
    frame: str = ""  # of an exception: where it was raised
    since: datetime | None = None
    block: int = 0
    raised: bool = False
    kernel: bool = False
    container: str = ""  # which was killed, of a pod that is described
    service: str = ""  # which was killed, by the word of systemd or supervisord

    @property
    def anybodys(self) -> bool:
        """Whether other software says it, too, and not the kernel of its machine."""
        return (self.pattern is UNKNOWN or self.pattern.anybodys) and not self.kernel


@dataclass
class Launch:
    """One start of a server. died: the line that says so, 0 if none does; dying: the same line.

    served: the last line above that which says that it serves, 0 if none does. answered: the same
    of a request that got an answer. asked: of one that a scheduler must have answered. sparse: that
    line when the marks of a stage were last thinned out. neighbours: what befell other processes.
    """

    begins: int = 1
    server: Server = field(default_factory=Server)
    marks: dict[Stage, list[Mark]] = field(default_factory=dict)
    counts: Counter[Stage] = field(default_factory=Counter)
    dumps: list[str] = field(default_factory=list)
    died: int = 0
    died_at: datetime | None = None
    dying: Mark | None = None
    served: int = 0
    served_at: datetime | None = None
    answered: int = 0
    answered_at: datetime | None = None
    stacks: tuple[int, int] = (0, 0)  # the first and the last line of py-spy's stacks
    asked: int = 0
    asked_at: datetime | None = None
    neighbours: list[Mark] = field(default_factory=list)
    sparse: dict[Stage, int] = field(default_factory=dict)

    def add(self, mark: Mark) -> bool:
        """Whether it is kept. What the server has survived makes room for what comes later."""
        self.counts[mark.stage] += 1
        of_stage = self.marks.setdefault(mark.stage, [])
        if len(of_stage) >= MOST_MARKS and self.sparse.get(mark.stage, 0) < self.lived:
            self.sparse[mark.stage] = self.lived
            kept = [m for m in of_stage[1:] if not self.survives(m)]
            self.counts[mark.stage] -= len(of_stage) - 1 - len(kept)
            of_stage[1:] = kept
        if len(of_stage) >= MOST_MARKS:
            return False
        of_stage.append(mark)
        return True

    @property
    def ended(self) -> bool:
        told = (m for s in (Stage.ENDED, Stage.STANDS) for m in self.marks.get(s, []))
        asked = any(m.pattern is SIGTERM for m in self.marks.get(Stage.AFTER, []))
        return bool(self.died) or asked or any(not self.survives(m) for m in told)

    @property
    def lived(self) -> int:
        """The last line that says that its schedulers serve, 0 if none does."""
        return max(self.served, self.asked)

    @property
    def never_served(self) -> bool:
        """Whether the log has its beginning, and no word of its serving."""
        return self.server.started and not self.lived

    def all_marks(self) -> list[Mark]:
        return sorted((m for ms in self.marks.values() for m in ms), key=lambda m: m.line)

    def survives(self, mark: Mark) -> bool:
        """Whether the server served on behind it, and so it ended nothing."""
        if mark.kind is not None or mark.stage == Stage.SIGN or mark.pattern is SIGTERM:
            return False
        if self._answers(mark):
            return True
        if self.served <= mark.line or not mark.pattern.lasting:
            return self.served > mark.line
        since = mark.at if self.died or mark.since is None else mark.since
        if since is None or self.served_at is None:
            return not self.died
        return (self.served_at - since).total_seconds() >= SERVED_SECONDS

    def _answers(self, mark: Mark) -> bool:
        """Whether requests were answered long after it. Of a hang that says nothing.

        ``/health`` is answered by the main process. That ends when the kernel has killed another.
        """
        if self.died or mark.stage == Stage.STANDS:
            return False
        killed = mark.kernel and mark.pattern.section == KILLED
        line, at = (self.answered, self.answered_at) if killed else (self.asked, self.asked_at)
        since = mark.at or mark.since
        if line <= mark.line or at is None or since is None:
            return False
        return (at - lines.dated(since, at)).total_seconds() >= ANSWERED_SECONDS

    def drop(self, mark: Mark) -> None:
        """It was none of the server's."""
        if mark in (of_stage := self.marks.get(mark.stage, [])):
            of_stage.remove(mark)
            self.counts[mark.stage] -= 1

    def first(self) -> Mark | None:
        """The first cause; None if nothing was told that ends or slows a server."""
        marks = [m for m in self.all_marks() if self._counts(m) and not self.survives(m)]
        early = [m for m in marks if m.stage <= Stage.STANDS and m.pattern is not HEALTH]
        if early:
            return _of_early(early)
        ended = self._of_ended([m for m in marks if m.stage == Stage.ENDED])
        afters = [m for m in marks if m.stage == Stage.AFTER]
        after = self._of_after(afters)
        health = next((m for m in marks if m.pattern is HEALTH), None)
        if health is not None and (ended is None or health.line < ended.line):
            return health
        if ended is not None and _SIGKILL.search(ended.text):
            # A pod's description tells of the end above of what has ended it.
            by = next((m for m in afters if m.pattern in (PROBE, CLUSTER)), None)
            if by is not None:
                return by
        if ended is not None and after is not None and after.line < ended.line:
            if _SIGKILL.search(ended.text) and after.pattern is SIGTERM and _soon(after, ended):
                return replace(after, pattern=GRACE)
            # Who gives up on a peer aborts: that follows from NCCL's word above it.
            peer = after.pattern is NETWORK or bool(after.pattern.frames)
            if peer and _ABORTED.search(ended.text):
                return after
        signs = self.marks.get(Stage.SIGN, [])
        sign = min(signs, key=lambda m: (m.pattern.section == ITSELF, m.line), default=None)
        return ended or after or self.dying or sign

    def follow(self, first: Mark) -> int:
        """How many marks were told behind the first cause, those that are not kept included."""
        above = sum(m.line <= first.line for m in self.all_marks() if m.stage != Stage.SIGN)
        return sum(self.counts[stage] for stage in Stage if stage != Stage.SIGN) - above

    def _of_ended(self, ended: list[Mark]) -> Mark | None:
        """What ended the process: a kill; or a traceback that nobody caught; or the last words."""
        killed = [m for m in ended if m.pattern.section == KILLED]
        raised = [m for m in ended if m.raised]
        words = [] if self.died else ended  # of a child that failed these are not
        return next(filter(None, map(_known, (killed, raised, words))), None)

    @staticmethod
    def _of_after(after: list[Mark]) -> Mark | None:
        first = _known([m for m in after if m.pattern is not ROUTER] or after)
        if first is None or first.pattern in (SIGTERM, UNKNOWN):
            return first
        # NCCL's own word says more than that of the process that was waiting for it.
        return next((m for m in after if m.pattern is NETWORK and _near(first, m)), first)

    def _counts(self, mark: Mark) -> bool:
        """Whether it may have ended the launch: it was not told, and survived, long before."""
        if mark.kind is not None or mark.at is None or self.died_at is None:
            return True
        return (self.died_at - mark.at).total_seconds() <= BEFORE_SECONDS


def _known(marks: list[Mark]) -> Mark | None:
    return next((m for m in marks if m.pattern is not UNKNOWN), marks[0] if marks else None)


def _of_early(early: list[Mark]) -> Mark:
    """The first of them, or what explains it and is told a little later."""
    if any(m.raised for m in early):
        thrown = {m.pattern for m in early if not _loose(m)}
        early = [m for m in early if m.pattern in thrown]
    chosen = early[0]
    if chosen.stage == Stage.CAUSE:
        return next((_named(chosen, m) for m in early[1:] if _near(chosen, m)), chosen)
    near = [m for m in early[1:] if _near(chosen, m)]
    for mark in near:
        if mark.stage == Stage.CAUSE and _explains(mark, chosen):
            return _named(mark, chosen)
    # Which other error of the same moment has a name? Not where ours has one.
    if chosen.pattern is UNKNOWN:
        same = (m for m in near if m.pattern is not UNKNOWN)
        return next((m for m in same if m.rank == chosen.rank or _same_block(m, chosen)), chosen)
    return chosen


def _named(assertion: Mark, exception: Mark) -> Mark:
    """An assertion, with the entry of the exception that it led to, if that knows more."""
    if exception.pattern.entry in assertion.pattern.also and exception.pattern.server:
        entry = patterns.of_entry(assertion.pattern, exception.pattern.entry)
        return replace(assertion, pattern=entry)
    return assertion


def _loose(mark: Mark) -> bool:
    """Whether it is only said, and nobody raised it: at a start something else may be tried."""
    return mark.pattern.section == OTHER and not (mark.raised or mark.pattern.explains)


def _explains(mark: Mark, chosen: Mark) -> bool:
    """A finding does, of any rank; an assert or a broken GPU, of the same rank or of no known one.

    The flight recorder tells an exception before SGLang does, and so without a name.
    """
    same = mark.rank in ("", chosen.rank) or not chosen.rank
    told = chosen.kind is not None or mark.pattern.explains
    return mark.kind is not None or (told and same)


def _of_server(pattern: Pattern, server: Server) -> Pattern | None:
    """The pattern as it holds of a server, None if it does not.

    If only the release is missing that tells whether the server has the bug, the entry that is
    right in any case goes first.
    """
    missing = set(pattern.server) - server.words() if pattern.server else ()
    if not missing:
        return pattern
    if missing == {f"may have entry {pattern.entry}"} and not server.known:
        return patterns.of_entry(pattern, pattern.also[0])
    return None


def _same_block(one: Mark, other: Mark) -> bool:
    return one.block == other.block != 0


def _near(one: Mark, other: Mark) -> bool:
    if one.at is not None and other.at is not None:
        return abs((other.at - one.at).total_seconds()) <= NEAR_SECONDS
    return other.line - one.line <= NEAR_LINES


def _soon(one: Mark, other: Mark) -> bool:
    if one.at is None or other.at is None:
        return other.line - one.line <= NEAR_LINES
    return (other.at - one.at).total_seconds() <= BEFORE_SECONDS


@dataclass(frozen=True)
class Reading:
    """What a log says. launches: those that are kept, in its order; left_out: how many are not.

    errors: how many lines speak of an error in a form that is not known; error: the first of them.
    foreign: it has lines of other software, and none of SGLang. theirs: they name that software.
    headed: how many lines have the head of SGLang's own. odd: how many say what SGLang says, and
    have no such head; at: the first of those. single: it is no log. backwards: its last line was
    told first.
    """

    launches: tuple[Launch, ...]
    read: int  # lines
    left_out: int = 0
    errors: int = 0
    error: tuple[int, str] = (0, "")  # its number and text
    foreign: bool = False
    theirs: bool = False
    headed: int = 0
    odd: int = 0
    at: int = 0
    single: bool = False
    backwards: bool = False

    @property
    def chosen(self) -> Launch:
        """The launch to tell of: the last one that ended, whether it is known why or not."""
        ended = [x for x in self.launches if x.ended]
        told = [x for x in self.launches if x.first() is not None]
        return (ended or told or list(self.launches))[-1]


class Reader:
    """Takes the lines of a log one by one."""

    def __init__(self, single: bool = False, installed: str = "") -> None:
        self._installed = installed
        self._launches: list[Launch] = [Launch(server=Server(installed=installed))]
        self._left_out = 0
        self._traceback: deque[str] = deque(maxlen=FRAMES)
        self._recent: deque[str] = deque(maxlen=4)
        self._open = self._fatal = False
        self._block = 0
        self._block_rank = ""
        self._block_at: datetime | None = None
        self._raised = Stage.ENDED
        self._raising = False  # the exception of the traceback has not been named yet
        self._at: datetime | None = None
        self._stamped, self._head = 0, b""  # the last line that has a time
        self._since = 0  # lines that are not empty, since then
        self._stamp = b""
        self._waiting: list[Mark] = []  # for the next time
        self._forth = self._back = 0  # how often the time goes on, and how often it goes back
        self._unwell = 0  # health checks that failed, since the last batch
        self._number = 0
        self._single = single
        self._errors, self._error = 0, (0, "")
        self._wrapping = carriers.Unwrapper()
        self._pod = neighbours.Pod()
        self._services = neighbours.Services()
        self._load = Load()
        self._ours = False
        self._headed = self._odd = self._odd_at = 0
        self._strange = 0
        self._theirs = False
        self._marked = 0  # the last line that says something
        self._client: list[Mark] | None = None  # below a line that may quote a client

    def take(self, data: bytes) -> None:
        self._number += 1
        for line in self._wrapping.lines(data):
            self._take(line)
            if not self._ours and line.strip():
                self._theirs = self._theirs or _THEIRS.search(line) is not None
                self._strange += not self._open and self._marked != self._number

    def _take(self, data: bytes) -> None:
        head = data[:KEPT]
        if (found := lines.head(head)) is not None:
            self._ours = self._ours or found.own or _OURS.search(data) is not None
            self._headed += 1
            self._time(found.stamp, head)
            self._says(found, head)
        else:
            self._since += bool(head.strip())
            self._pod.take(head)
            self._services.take(head)
            self._ours = self._ours or (
                _OURS.search(data) is not None and _FETCHED.match(head) is None
            )
            if not self._single and (said := _SAID.search(head)) is not None:
                self._odd += 1
                self._odd_at = self._odd_at or self._number
                if said[0] != b"server_args=" and said[0] != b"Load weight begin":
                    self._serves()
        # Most of a log are SGLang's statistics, and they accuse nobody.
        if found is not None:
            statistics = found.serves or found.code != 0
        else:
            statistics = any(word in head for word in _STATISTICS)
        looked_at = self._open or self._single
        if not looked_at and (statistics or TRIGGER.search(data) is None):
            return
        line = lines.read(self._number, data)
        if _CLIENT.match(line.text):
            self._client = []
        if line.quotes:
            return
        self._launch(line)
        self._frames(line)
        self._mark(line)
        self._recent.append(line.text[:KEPT])

    def _time(self, stamp: bytes, head: bytes) -> None:
        """A line has a time. Lines above it without one were told until then."""
        if stamp == carriers.NO_TIME.encode():
            return
        if stamp != self._stamp:
            before = self._at
            try:
                self._at = datetime.fromisoformat(stamp.decode())
            except ValueError:
                return
            self._stamp = stamp
            if before is not None:
                self._forth += before < self._at
                self._back += before > self._at
        self._stamped, self._head, self._since = self._number, head, 0
        for mark in self._waiting:
            if mark.at is None or self._at is None:
                mark.at = self._at
            else:  # the kernel's, without a year
                mark.at = lines.dated(mark.at, self._at)
        self._waiting.clear()

    def _says(self, head: Head, data: bytes) -> None:
        """A line with SGLang's head: a batch, an answer to a client, or anything else."""
        launch = self._launches[-1]
        if self._client is not None:
            if 400 <= head.code < 500:  # what was said in between was the client's
                for mark in self._client:
                    launch.drop(mark)
            self._client = None
        if head.serves:
            self._serves()
            if (sign := self._load.take(data, self._at)) is not None:
                line = lines.read(self._number, data)
                self._add(launch, line, sign)
        elif head.code == 200 and not launch.died:
            launch.answered, launch.answered_at = self._number, self._at
            if head.path.startswith((b"/generate", b"/v1/", b"/health_generate")):
                launch.asked, launch.asked_at = self._number, self._at

    def _serves(self) -> None:
        launch = self._launches[-1]
        self._unwell = 0
        if not launch.died:
            launch.served, launch.served_at = self._number, self._at

    def _launch(self, line: Line) -> None:
        launch = self._launches[-1]
        if _STARTS.match(line.text) and (launch.ended or launch.served):
            launch = Launch(line.number, Server(installed=self._installed))
            self._launches.append(launch)
            self._load = Load()
            self._unwell = 0
            if len(self._launches) > MOST_LAUNCHES:
                del self._launches[1]
                self._left_out += 1
        launch.server.take(line.text)
        if not launch.died and (_DIED.search(line.text) or _CHILD_FAILED.search(line.text)):
            launch.died, launch.died_at = line.number, line.at or self._at
            text = line.text.strip()[:KEPT]
            launch.dying = Mark(line.number, launch.died_at, line.rank, text, UNKNOWN, Stage.AFTER)
        if "Pyspy dump for PID" in line.text:
            launch.stacks = (launch.stacks[0] or line.number, line.number)
        if found := re.match(r" {2}dump: {5}(\S.*)$", line.text):
            launch.dumps[20:] = []
            launch.dumps.append(found[1].strip("'\""))

    def _frames(self, line: Line) -> None:
        if "Traceback (most recent call last)" in line.text:
            if not self._open or line.prefixed:
                self._traceback.clear()
                died = _DIED.search(line.text) is not None
                logged = line.prefixed or 0 < self._since <= HANDLED_LINES
                caught = line.prefixed or (logged and self._caught())
                self._fatal = died or not caught
                self._raised = Stage.SURFACED if died else Stage.ENDED
                self._block, self._block_rank = line.number, line.rank
                self._block_at = self._at if logged and self._stamped else None
            self._open = self._raising = True
        elif self._open and line.prefixed:
            self._open = self._raising = False
            self._traceback.clear()
        elif self._open and line.text.strip(" ^~"):
            self._traceback.append(line.text[:KEPT])

    def _caught(self) -> bool:
        """Whether a server that serves has logged the traceback itself, below a message of its own.

        At a start the same may be an exception that ends it, printed below some other line.
        """
        launch = self._launches[-1]
        return bool(launch.served) and not launch.died and bool(_HANDLED.search(self._head))

    def _mark(self, line: Line) -> None:
        launch = self._launches[-1]
        text = line.text
        quoted = self._single or (not line.prefixed and not self._stamped)
        kind = patterns.kind_of(text, quoted)
        if kind is not None:
            self._add(launch, line, patterns.of_finding(kind, text), kind)
            return
        for one in PATTERNS:
            if one.regex.search(text) is None or not self._fits(one, text):
                continue
            if one.own and not (line.prefixed or self._single):
                continue
            if (pattern := _of_server(one, launch.server)) is None:
                continue
            if one in OUTSIDE and launch.died:
                return
            if one is RETRACTS and self._load.even:
                return  # both pools are full, and that is the load
            if self._other(launch, line, pattern):
                return
            if pattern is HEALTH and "SIGTERM" not in text:
                self._unwell += 1
                if self._unwell < 2 and not self._single:
                    return
            self._add(launch, line, pattern, stage=self._stage(pattern))
            return
        exception = _EXCEPTION.match(text)
        if self._fatal and self._open and len(self._traceback) > 1 and exception:
            self._add(launch, line, UNKNOWN, stage=self._raised)
        elif _CHILD_FAILED.search(text):
            self._add(launch, line, UNKNOWN, stage=Stage.AFTER)
        elif _ERROR.search(text):
            self._errors += 1
            if self._errors == 1:
                self._error = (line.number, text.strip()[:KEPT])
        if exception:
            self._raising = False

    def _other(self, launch: Launch, line: Line, pattern: Pattern) -> bool:
        """Whether the line is about a process that is not SGLang's. It is kept as a neighbour."""
        name = neighbours.of_line(line.text, self._wrapping.containers)
        if name and not self._single:
            launch.neighbours[:] = [*launch.neighbours, self._made(line, pattern)][:MOST_MARKS]
            return True
        return False

    def _stage(self, pattern: Pattern) -> Stage:
        """The stage of a text where it stands: below an exception of SGLang it is what is wrong."""
        below = self._open and self._fatal and self._raised == Stage.SURFACED
        if below and pattern.stage == Stage.ENDED and pattern.section == OTHER:
            return Stage.CAUSE
        return pattern.stage

    def _fits(self, pattern: Pattern, text: str) -> bool:
        if not pattern.frames:
            return True
        raised = next((x for x in reversed(self._traceback) if x.lstrip().startswith("File ")), "")
        if any(frame in raised for frame in pattern.never):
            return False
        context = [*self._traceback, *self._recent, text]
        if pattern.stage == Stage.CAUSE and "block: [" not in pattern.frames:
            if not self._open:
                return False
            context = list(self._traceback)[-INNERMOST - 1 :]
        if pattern.innermost:
            if self._launches[-1].never_served:
                return False  # it holds nothing yet that could be wrong
            context = [x for x in context if x.lstrip().startswith("File ")][-1:]
            # What is only being made has no state yet that could be wrong: it refuses an argument.
            context = [x for x in context if not x.rstrip().endswith(", in __init__")]
        return any(frame in one for frame in pattern.frames for one in context)

    def _add(
        self,
        launch: Launch,
        line: Line,
        pattern: Pattern,
        kind: FindingKind | None = None,
        stage: Stage | None = None,
    ) -> None:
        mark = self._made(line, pattern, kind, stage)
        if not launch.add(mark):
            return
        if mark.at is None or mark.at.year == lines.NO_YEAR:
            self._waiting.append(mark)
        if self._client is not None:
            self._client.append(mark)

    def _made(
        self,
        line: Line,
        pattern: Pattern,
        kind: FindingKind | None = None,
        stage: Stage | None = None,
    ) -> Mark:
        self._marked = self._number
        frames = [x.strip() for x in self._traceback if x.lstrip().startswith("File ")]
        inside = self._open and self._raising
        at = line.at or (self._block_at if inside else None)
        if at is not None and at.year == lines.NO_YEAR and self._at is not None:
            at = lines.dated(at, self._at)
        killed = pattern.section == KILLED
        of_pod = killed and _OF_POD.search(line.text) is not None
        return Mark(
            line.number,
            at,
            line.rank or (self._block_rank if self._open else ""),
            line.text.strip()[:KEPT],
            pattern,
            pattern.stage if stage is None else stage,
            kind,
            frames[-1] if frames and self._open and kind is None else "",
            since=self._at if at is None or at.year == lines.NO_YEAR else at,
            block=self._block if self._open else 0,
            raised=self._open and self._fatal,
            kernel=line.kernel,
            container=self._pod.container if of_pod else "",
            service=neighbours.service(line.text) if killed else "",
        )

    def result(self) -> Reading:
        for mark in self._waiting:  # no time was told behind them
            mark.at = self._at
        for launch in self._launches:
            for mark in launch.all_marks():
                pod, logged = self._pod, self._wrapping.containers
                other = bool(mark.container) and pod.other(mark.container, logged)
                if other or (mark.service and self._services.other(mark.service)):
                    launch.drop(mark)
                    launch.neighbours.append(mark)
        return Reading(
            tuple(self._launches),
            self._number,
            self._left_out,
            self._errors,
            self._error,
            foreign=not self._ours
            and (self._theirs or self._strange >= STRANGE)
            and not self._single,
            theirs=self._theirs,
            headed=self._headed,
            odd=self._odd,
            at=self._odd_at,
            single=self._single,
            backwards=self._back >= LEAST_BACK and self._back > MOSTLY * self._forth,
        )


def read(stream: BinaryIO, installed: str = "") -> Reading:
    """Read a whole log, of any size; gzip's are unpacked. Raises OSError as the stream does.

    A log that is packed otherwise raises CompressedError, and one that ends amid a packed part
    EOFError.
    installed: the release of SGLang on this machine, if the user says that it is the server's.
    """
    return of(lines.raw(lines.opened(stream)), installed=installed)


def of(log: Iterable[bytes], single: bool = False, installed: str = "") -> Reading:
    """The same of lines. single: they are a line that somebody looks up, and no log."""
    reader = Reader(single, installed)
    for line in log:
        reader.take(line)
    return reader.result()
