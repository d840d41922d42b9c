"""One request's way through the scheduler and the KV pools, as data: from what a dump holds.

Its events come from the flight recorder (``RequestEvent``), its pages from the ledger's events, its
verifies from the tape, its steps from the last steps. What one of them lacks is said. A request of
whom the same rid was used before is followed from its last arrival on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate, takewhile

from g4debug.findings import tape as tapes
from g4debug.findings.names import LONGEST_ID
from g4debug.findings.record import PageEvent, RequestEvent, Step, TrapRecord
from g4debug.findings.runs import runs
from g4debug.findings.status import LEDGER
from g4debug.findings.tape_record import data
from g4debug.reporters.text import counted

CUT = 40  # bytes of a rid in the black box's events
GIVES = ("alloc", "extend", "decode")
WINDOW = ("evict_swa", "evict_sliding_windows")
TAKES = ("free", "evict")
CACHE_ACTIONS = ("apply_component_action", "_apply_cache_action")  # of 0.5.23's tree
BY_CACHE = "the prefix cache freed"
POOLS = {"full": "full", "swa": "SWA"}
NOW = ("waits", "runs")
WAITED = 0.1  # seconds: a shorter wait has no line
MOST = 8  # chunks in a row that are told one by one, and pages of many that are named


@dataclass(frozen=True)
class Held:
    """Pages that a request holds. -1: not known, or there is no such pool."""

    full: int = -1
    swa: int = -1


@dataclass(frozen=True)
class PageLine:
    """What happened to which pages, and by whom: ``schedule_batch.py:2744 _evict_swa``."""

    text: str
    caller: str = ""


@dataclass
class Moment:
    """One line of the timeline. at: seconds since the first moment. pages: lines below it."""

    first: int  # step
    last: int
    at: float | None
    kind: str
    text: str
    pages: list[PageLine] = field(default_factory=list)
    events: list[PageEvent] = field(default_factory=list)


@dataclass
class Verifies:
    count: int
    tokens: int
    least: int
    most: int


@dataclass
class Way:
    """state: "waiting", "prefill", "decode", "ended" or "not known". since: seconds; None: not
    known. matched: tokens of its first prefix match, -1 if not known. unknown: what the dump does
    not tell, and how to get it, in sentences.
    """

    request: str
    state: str = "not known"
    state_text: str = ""
    since: float | None = None
    prompt: int = -1
    output: int = -1
    longest: int = -1
    matched: int = -1
    waited: float = 0.0  # seconds in the queue, before it was scheduled and after retractions
    held: Held = Held()
    verifies: Verifies | None = None
    moments: list[Moment] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    finding: str = ""


def known_requests(record: TrapRecord) -> list[str]:
    """Every rid that the dump tells something about, in the order in which they came."""
    record = _joined(record)
    found = [e.request for e in record.requests if e.kind != "abort"]
    found += [rid for step in record.steps for rid in step.rids]
    known = {*found, *map(_cut, found)}
    found += [
        e.request
        for e in (*record.allocator, *record.events)
        if e.request not in known and not _several(e.request)
    ]
    found.append(record.finding.location.request)
    return [rid for rid in dict.fromkeys(found) if rid]


def _cut(rid: str) -> str:
    """A rid as the black box has it in an event of a page."""
    return rid.encode("utf-8", "replace")[:CUT].decode("utf-8", "ignore")


def _joined(record: TrapRecord) -> TrapRecord:
    """The record with the whole id in the events of a request, which have only its beginning.

    The steps have it whole. Where two of them begin alike, nobody knows whose the events are.
    """
    whole: dict[str, set[str]] = {}
    for rid in (rid for step in record.steps for rid in step.rids if len(rid) > LONGEST_ID):
        whole.setdefault(rid[:LONGEST_ID], set()).add(rid)
    known = {short: min(rids) for short, rids in whole.items() if len(rids) == 1}
    if not known:
        return record
    events = (replace(e, request=known.get(e.request, e.request)) for e in record.requests)
    return replace(record, requests=tuple(events))


def _several(request: str) -> bool:
    """True for ``3 requests``, by which the ledger names the owners of pages that are freed."""
    number, _, word = request.partition(" ")
    return word == "requests" and number.isdecimal()


def follow(record: TrapRecord, rid: str, everything: bool = False) -> Way:
    """everything: each chunk and each page event has a line."""
    return _Trace(_joined(record), rid, everything).way()


class _Trace:
    def __init__(self, record: TrapRecord, rid: str, everything: bool) -> None:
        self.record, self.rid, self.everything = record, rid, everything
        mine = [e for e in record.requests if e.request == rid]
        arrivals = [i for i, e in enumerate(mine) if e.kind == "arrives"]
        self.lives = len(arrivals)
        mine = mine[arrivals[-1] :] if arrivals else mine
        self.now = next((e for e in mine if e.kind in NOW), None)
        self.arrival = mine[0] if arrivals else None
        since = self.arrival.time_ns if self.arrival else 0
        aborts = [
            e
            for e in record.requests
            if e.kind == "abort" and rid.startswith(e.request) and e.time_ns >= since
        ]
        known = [e for e in mine if e.kind not in NOW]
        end = next((e.time_ns for e in known if e.kind == "ends"), None)
        known += [e for e in aborts if end is None or e.time_ns <= end]
        # SGLang's tokenizer may ask for one abort several times.
        once = {(e.step, e.kind, e.begin, e.request): e for e in reversed(known)}
        self.known = sorted(once.values(), key=lambda e: e.time_ns)
        # What it did itself is in later steps than its arrival: it came behind the last one.
        self.after = self.arrival.step if self.arrival else -1
        mine_too = (s for s in record.steps if rid in s.rids and s.step > self.after)
        self.steps = sorted(mine_too, key=lambda s: s.step)
        self.others = {e.request for e in record.requests} - {rid}
        self.others |= {other for s in record.steps for other in s.rids if other != rid}
        # The pages of a black box may be those of any of these.
        self.twins = {other for other in self.others if _cut(other) == _cut(rid)}
        self.page = self._page_size()
        times = [e.time_ns for e in self.known] + [s.time_ns for s in self.steps if s.time_ns > 0]
        self.zero = min(times, default=0)
        self.found = Way(rid)
        # Of the requests before it on the tape, by how many bytes of hashes are the same, most
        # first: minus that number, and the first id of all up to there.
        self.alike: tuple[list[int], list[int]] | None = None

    @cached_property
    def names(self) -> dict[int, str]:
        """The rids of the requests on the tape, by their numbers."""
        return {e.number: e.request for e in self.record.requests if e.number > 0}

    def _page_size(self) -> int:
        sizes = {p.name: p.page_size for p in self.record.pools}
        tape = self.record.tape
        return sizes.get("full", tape.page if tape is not None else 0)

    def way(self) -> Way:
        found = self.found
        moments = list(self._moments())
        moments += list(self._from_steps(moments))
        moments.sort(key=lambda m: m.first)
        self._pages(moments)
        moments.sort(key=lambda m: m.first)  # it has added some
        found.moments = moments if self.everything else list(_folded(moments))
        self._state()
        finding = self.record.finding
        if finding.location.request == self.rid and finding.check != "flight-recorder":
            found.finding = finding.headline
        found.unknown = list(self._unknown())
        return found

    def _at(self, time_ns: int) -> float | None:
        return (time_ns - self.zero) / 1e9 if time_ns > 0 and self.zero else None

    # --- what happened ------------------------------------------------------------------------

    def _moments(self) -> Iterator[Moment]:
        """The moments of its events, and the decoding between them."""
        recording, number = self._recording()
        begun: RequestEvent | None = None  # the chunk with which its prefill was complete
        before: RequestEvent | None = None  # what happened before, but for an abort
        chunks = 0
        for event in self.known:
            if begun is not None and event.kind in ("retracted", "ends"):
                yield from self._decoding(begun, event)
                begun = None
            text = ""
            if event.kind == "arrives":
                self.found.prompt, self.found.longest = event.tokens, event.longest
                longest = f", at most {event.longest:,} of output" if event.longest >= 0 else ""
                prompt = f" with a prompt of {event.tokens:,} tokens" if event.tokens >= 0 else ""
                text = f"arrived{prompt}{longest}"
            elif event.kind == "chunk":
                if before is not None and before.kind != "chunk":
                    chunks = 0
                    yield from self._match(event, before, recording, number)
                chunks += 1
                whole = event.end >= event.tokens
                length = event.end - event.begin
                text = f"chunk {chunks}: {length:,} tokens, {event.begin:,} to {event.end - 1:,}"
                text += "; prefill complete" if whole else f" of {event.tokens:,}"
                begun = event if whole else None
                self.found.output = event.output
            elif event.kind == "retracted":
                text = (
                    f"retracted with {event.output:,} tokens of output: its KV is given back, and "
                    "it waits again"
                )
                self.found.output = event.output
            elif event.kind == "abort":
                whose = "of all requests " if not event.request else ""
                text = f"an abort {whose}was asked for" + (f": {event.note}" if event.note else "")
            elif event.kind == "ends":
                text = f"ended ({event.note}) with {event.output:,} tokens of output"
                self.found.output = event.output
            if event.kind != "abort":
                before = event
            yield Moment(event.step, event.step, self._at(event.time_ns), event.kind, text)
        if begun is not None:
            yield from self._decoding(begun, self.now)
        if recording is not None and number in recording.requests:
            counts = recording.requests[number].accepted
            if counts:
                self.found.verifies = Verifies(len(counts), sum(counts), min(counts), max(counts))

    def _decoding(self, begun: RequestEvent, until: RequestEvent | None) -> Iterator[Moment]:
        """The steps between the last chunk and the next event; now if that is None or NOW."""
        first = begun.step + 1
        last = until.step if until is not None else self._last_step()
        if last < first:
            return
        begin = bisect_left(self.steps, first, key=lambda s: s.step)
        end = bisect_right(self.steps, last, key=lambda s: s.step)
        seen = range(begin, end)  # of its steps
        whole = bool(self.record.steps) and self.record.steps[0].step <= first
        if not seen and (whole or until is None):
            return
        if whole or until is None:
            last = self.steps[end - 1].step
        got = "" if until is None else f", up to {until.output:,} tokens of output"
        took = "" if until is None else f" in {duration((until.time_ns - begun.time_ns) / 1e9)}"
        text = f"{counted(len(seen), 'step')} of decode" if whole else "decoded"
        text += took + got
        at = self._at(self.steps[begin].time_ns) if whole else None
        yield Moment(first, last, at, "decode", text)

    def _last_step(self) -> int:
        return (
            self.record.steps[-1].step if self.record.steps else self.record.finding.location.step
        )

    def _match(
        self,
        chunk: RequestEvent,
        waits: RequestEvent,
        recording: tapes.Recording | None,
        number: int,
    ) -> Iterator[Moment]:
        """How long it waited, how much of it was in the prefix cache, and whose that was."""
        words = []
        seconds = (chunk.time_ns - waits.time_ns) / 1e9
        self.found.waited += seconds
        if seconds >= WAITED:
            steps = counted(chunk.step - waits.step, "step")
            words.append(f"scheduled, after it waited for {duration(seconds)} ({steps})")
        if chunk.begin:
            pages = f" ({_pages(chunk.begin // self.page)})" if self.page else ""
            words.append(f"{chunk.begin:,} tokens{pages} were in the prefix cache")
            words += self._whose(chunk, recording, number)
        elif self.record.arguments.get("disable_radix_cache") is not True:
            words.append("nothing of it was in the prefix cache")
        if self.found.matched < 0 and waits is self.arrival:
            self.found.matched = chunk.begin
        if words:
            at = self._at(chunk.time_ns)
            yield Moment(chunk.step, chunk.step, at, "match", "; ".join(words))

    def _whose(
        self, chunk: RequestEvent, recording: tapes.Recording | None, number: int
    ) -> list[str]:
        """Which requests on the tape began with the same tokens, by the hashes of their pages."""
        if recording is None or number not in recording.requests:
            return []
        page, firsts = recording.page, recording.firsts
        mine = recording.requests[number]
        wanted = tapes.hash_bytes(page, min(chunk.begin, mine.prompt) // page * page, 0, firsts)
        if self.alike is None:
            earlier = takewhile(lambda other: other.id < number, recording.requests.values())
            found = sorted((-_alike(other.hashes, mine.hashes), other.id) for other in earlier)
            self.alike = [n for n, _ in found], list(accumulate((id_ for _, id_ in found), min))
        lengths, first = self.alike
        same = bisect_right(lengths, -wanted) if wanted else 0
        if same:
            name = self.names.get(first[same - 1], f"no. {first[same - 1]} of this process")
            more = f", and then {same - 1} more" if same > 1 else ""
            return [f"request {name} had the same ones first{more}"]
        if recording.begins.requests:
            return ["who had the same ones first came before the tape begins"]
        return []

    def _recording(self) -> tuple[tapes.Recording | None, int]:
        """The tape, and the number that the request has there."""
        tape = self.record.tape
        if tape is None or self.arrival is None or self.arrival.number < 0:
            return None, -1
        try:
            recording = tapes.read(data(tape), tape.page, tape.firsts)
        except tapes.TapeError:
            return None, -1
        # Requests are counted from the first on the tape.
        number = self.arrival.number
        mine = recording.requests.get(number)
        if mine is not None and mine.prompt != self.arrival.tokens:
            return None, -1  # it counts others
        return recording, number

    def _from_steps(self, moments: Sequence[Moment]) -> Iterator[Moment]:
        """Moments of the last steps that no event tells of."""
        spans = sorted((m.first, m.last) for m in moments if m.kind != "abort")
        firsts, ends = [first for first, _ in spans], list(accumulate((e for _, e in spans), max))
        run: list[Step] = []
        for step in self.steps:
            before = bisect_right(firsts, step.step)
            if before and step.step <= ends[before - 1]:
                continue
            extends = _extends(step)
            goes_on = run and step.step - run[-1].step == 1 and not extends
            if not goes_on or _extends(run[-1]):
                if run:
                    yield self._run(run)
                run = []
            run.append(step)
        if run:
            yield self._run(run)

    def _run(self, run: Sequence[Step]) -> Moment:
        length = self._tokens(run[-1])
        if _extends(run[0]):
            text = "prefill" + (f", up to token {length:,}" if length >= 0 else "")
            kind = "chunk"
        else:
            text = counted(len(run), "step") + " of decode"
            if 0 <= (before := self._tokens(run[0])) < length:
                text += f", from {before:,} to {length:,} tokens"
            kind = "decode"
        return Moment(run[0].step, run[-1].step, self._at(run[0].time_ns), kind, text)

    def _tokens(self, step: Step) -> int:
        """The length that the request had when a step began, -1 if it is not known."""
        at = step.rids.index(self.rid)
        for column in (step.seq_lens, step.committed):
            if at < len(column):
                return column[at]
        return -1

    # --- pages --------------------------------------------------------------------------------

    def _pages(self, moments: list[Moment]) -> None:
        """Put each event of the request's pages below the moment that it belongs to."""
        ended = next((m for m in reversed(moments) if m.kind == "ends"), None)
        own = {m.first for m in moments if m.kind in ("chunk", "retracted", "ends")}
        firsts = [m.first for m in moments]
        later: dict[object, list[PageEvent]] = {}
        there: list[PageEvent] = []
        for event in self._page_events():
            gone = ended is not None and event.step > ended.last
            if gone or (_by_cache(event) and event.step not in own):
                before = bisect_right(firsts, event.step)
                later.setdefault((gone, _by_cache(event), before), []).append(event)
            else:
                there.append(event)
        if there and not moments:
            moments.append(Moment(there[0].step, there[0].step, None, "pages", "its pages"))
        steps = [event.step for event in there]
        taken = _nearest(moments, ("chunk", "decode"), steps)
        given = _nearest(moments, ("retracted", "ends"), steps)
        for event, take, give in zip(there, taken, given, strict=True):
            takes = event.kind in GIVES or behind(event)
            moments[take if takes else give].events.append(event)
        for events in later.values():
            text = "pages that had been its own came back"
            if _by_cache(events[0]):
                text = "the prefix cache freed pages that came from this request"
            new = Moment(events[0].step, events[-1].step, None, "afterwards", text, events=events)
            moments.append(new)
        for moment in moments:
            lines = _told(moment.events, self.everything)
            if moment.kind == "afterwards":
                lines = (replace(one, text=one.text.replace(BY_CACHE, "freed")) for one in lines)
            moment.pages = list(lines)

    def _page_events(self) -> Iterator[PageEvent]:
        """The events of its own pages, and frees of several requests' pages with one of its own."""
        names = {self.rid} if self.twins else {self.rid, _cut(self.rid)} - self.others
        mine: set[tuple[str, int]] = set()
        for event in self.record.allocator:
            if event.step <= self.after and self.after >= 0:
                continue
            named = {(event.pool, page) for page in event.pages}
            own = event.request in names
            if event.kind in GIVES:
                if own:
                    mine |= named
                else:
                    mine -= named
            if own or (_several(event.request) and named & mine):
                yield event

    # --- now ----------------------------------------------------------------------------------

    def _state(self) -> None:
        found, now = self.found, self.now
        last = self.known[-1] if self.known else None
        ends = next((e for e in self.known if e.kind == "ends"), None)
        begins = self.arrival.time_ns if self.arrival else 0
        made = now.time_ns if now is not None else _made(self.record)
        until = ends.time_ns if ends is not None else made
        if begins and until >= begins:
            found.since = (until - begins) / 1e9
        chunk = next((e for e in reversed(self.known) if e.kind in ("chunk", "retracted")), None)
        if ends is not None:
            aborted = ends.note.startswith("abort")
            found.state, found.held = "ended", Held(0, 0 if self._hybrid() else -1)
            found.state_text = "aborted" if aborted else f"ended ({ends.note})"
        elif now is not None:
            found.output = now.output
            found.held = self._held(now.allocated, now.evicted)
            prefill = chunk is None or chunk.kind == "retracted" or chunk.end < chunk.tokens
            if now.kind == "waits":
                found.state = "waiting"
                again = ", retracted" if chunk is not None and chunk.kind == "retracted" else ""
                found.state_text = f"waiting in the {now.note}{again}"
            elif prefill and chunk is not None and chunk.kind == "chunk":
                found.state = "prefill"
                found.state_text = f"in prefill, at token {chunk.end:,} of {chunk.tokens:,}"
            else:
                found.state = "prefill" if not now.output else "decode"
                found.state_text = f"in {found.state}"
        elif self.arrival is not None and last is not None and last.kind == "abort" and not chunk:
            found.state, found.state_text = "ended", "aborted while it waited"
            found.held = Held(0, 0 if self._hybrid() else -1)
        elif last is not None and last.kind in ("arrives", "retracted") and not self._told_now():
            found.state, again = "waiting", " again" * (last.kind == "retracted")
            found.state_text = f"waiting, as it had not been scheduled{again}"
            found.held = Held(0, 0 if self._hybrid() else -1)
        else:
            self._state_by_steps()

    def _told_now(self) -> bool:
        """True if the dump says where requests were when it was made: a black box does not."""
        return any(e.kind in NOW for e in self.record.requests)

    def _state_by_steps(self) -> None:
        """Without an event that says where it is now."""
        found, steps = self.found, self.record.steps
        if not self.steps:
            found.state_text = "where it was when the dump was made is not known"
            if self._told_now():
                found.state_text = "in no queue or batch of SGLang's when the dump was made"
            return
        last = self.steps[-1]
        if steps and last is steps[-1]:
            found.state = "prefill" if _extends(last) else "decode"
            found.state_text = f"in {found.state} (last step: {last.step})"
            if found.prompt >= 0:  # of the output all but the last token have KV
                found.output = max(found.output, self._tokens(last) - found.prompt)
            at = last.rids.index(self.rid)
            allocated, evicted = (
                column[at] if at < len(column) else -1 for column in (last.allocated, last.evicted)
            )
            found.held = self._held(allocated, evicted)
        else:
            found.state_text = f"in no batch since step {last.step}: it ended there or waits"

    def _hybrid(self) -> bool:
        return any(p.name == "swa" for p in self.record.pools)

    def _held(self, allocated: int, evicted: int) -> Held:
        if allocated < 0 or self.page <= 0:
            return Held()
        full = -(-allocated // self.page)
        if not self._hybrid() or evicted < 0:
            return Held(full)
        return Held(full, max(0, full - evicted // self.page))

    # --- what the dump does not tell ----------------------------------------------------------

    def _unknown(self) -> Iterator[str]:
        record = self.record
        live = "A dump of the live server has it: g4debug doctor --pid PID --request RID"
        if not record.requests and not record.requests_lost:
            steps = _range(record.steps)
            yield (
                "This dump has no request events (an older dump and a server with G4DEBUG_TAPE=0 "
                "have none): arrival, prefix match, retractions and the end are not known, only "
                f"what the steps {steps} show. {live}"
            )
        elif self.arrival is None:
            first = record.requests[0].step if record.requests else 0
            yield (
                f"Its arrival is not in this dump: the request events begin in step {first}, and "
                f"{record.requests_lost:,} before that were dropped. {live}, if it is asked in time"
            )
        if self.lives > 1:
            yield f"This rid came {self.lives} times; it is followed from its last arrival on"
        ledger = next((t for t in record.tracers if t.name == LEDGER), None)
        events = next((c.count for c in ledger.checked if c.what == "events"), 0) if ledger else 0
        if not record.allocator and ledger is None:
            yield (
                "Its pages are not known: no tracer with a page ledger was armed "
                "(SGLANG_TRTLLM_MHA_DEBUG=1 arms them)"
            )
        elif ledger is not None and ledger.off:
            yield f"Its pages are not known from step {ledger.off_step} on: {ledger.off}"
        elif record.allocator and (not events or events > len(record.allocator)):
            first = record.allocator[0].step
            if not self.known or min(e.step for e in self.known) < first:
                yield f"Page events are known from step {first} on; earlier ones were dropped"
        short = _cut(self.rid)
        if self.twins and any(e.request == short for e in record.allocator) and short != self.rid:
            yield (
                f"Some of its pages are not known: a black box keeps {CUT} bytes of an id, which "
                f"are the same in {counted(len(self.twins), 'other request')} of this dump"
            )
        speculates = any(s.spec_info for s in self.steps)
        if speculates and self.found.verifies is None:
            lacks = "the dump does not say which request of the tape it is"
            if record.tape is None:
                lacks = "the dump has no tape"
            yield f"Its accept lengths are not known: {lacks}"


def behind(event: PageEvent) -> bool:
    """True if this event is the eviction of what lies behind the request's own window."""
    return event.kind == "evict" and any(name in event.caller for name in WINDOW)


def _nearest(moments: Sequence[Moment], kinds: Collection[str], steps: Sequence[int]) -> list[int]:
    """For each step the moment to which an event of pages in it belongs; there must be moments.

    That is the last one of these kinds which lasts until then, or else the last that had begun.
    moments: ordered by their first steps.
    """
    found = [0] * len(steps)
    near: list[int] = []  # those that go on, each of which ends before the one that it follows
    begun = rest = -1
    for i in sorted(range(len(steps)), key=steps.__getitem__):
        step = steps[i]
        while begun + 1 < len(moments) and moments[begun + 1].first <= step:
            begun += 1
            moment = moments[begun]
            if moment.kind not in ("abort", "match", "arrives"):
                rest = begun
            if moment.kind in kinds:
                while near and moments[near[-1]].last <= moment.last:
                    near.pop()
                near.append(begun)
        while near and moments[near[-1]].last < step:
            near.pop()
        known = (at for at in (near[-1] if near else -1, rest, begun) if at >= 0)
        found[i] = next(known, len(moments) - 1)
    return found


def _alike(one: bytes, other: bytes) -> int:
    """With how many of the same bytes two texts begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _by_cache(event: PageEvent) -> bool:
    """True if the prefix cache frees pages: its own, or those of which it has a copy."""
    where, _, function = event.caller.partition(" ")
    # When a request hands pages over that the cache has already, its own ones are freed.
    inserts = "insert" in function or "recover" in function
    known = "radix_cache" in where or function in CACHE_ACTIONS
    return event.kind in TAKES and known and not inserts


def _extends(step: Step) -> bool:
    return step.forward_mode in ("EXTEND", "MIXED", "SPLIT_PREFILL")


def _made(record: TrapRecord) -> int:
    """When the dump was made, in ns; 0 if that cannot be read."""
    try:
        return int(datetime.fromisoformat(record.created).timestamp() * 1e9)
    except ValueError:
        return 0


def duration(seconds: float) -> str:
    """``0.012 s``, ``12.3 s``, ``12.3 min``."""
    if abs(seconds) < 10:
        return f"{seconds:.3f} s"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.1f} min"


def _range(steps: Sequence[Step]) -> str:
    return f"{steps[0].step}-{steps[-1].step}" if steps else "(there are none)"


def _pages(count: int, name: str = "") -> str:
    return f"{count:,} {name}{' ' * bool(name)}page{'s' * (count != 1)}"


def ranges(pages: Iterable[int]) -> str:
    """``12-17, 30``."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs(pages))


def _told(events: Sequence[PageEvent], everything: bool) -> Iterator[PageLine]:
    """Lines about these events: those of the same kind and caller share one."""
    groups: dict[object, list[PageEvent]] = {}
    for event in events:
        key: object = (_word(event), event.caller, event.note, event.step if everything else 0)
        groups.setdefault(key, []).append(event)
    for of in groups.values():
        first = of[0]
        step = f"step {first.step}: " if everything else ""
        pools: dict[str, list[PageEvent]] = {}
        for event in of:
            pools.setdefault(event.pool, []).append(event)
        pages = "; ".join(_in_pool(pool, some, everything) for pool, some in pools.items())
        shared = " (with pages of other requests)" if any(_several(e.request) for e in of) else ""
        stopped = " (stopped by g4debug)" if first.stopped else ""
        note = f" ({first.note})" if first.note else ""
        yield PageLine(f"{step}{_word(first)} {pages}{shared}{stopped}{note}", first.caller)


def _in_pool(pool: str, events: Sequence[PageEvent], everything: bool) -> str:
    """``full pages 12-17``, or ``16 full pages (4, 13 and 14 more)`` if not all can be named."""
    named = sorted({page for e in events for page in e.pages})
    name, count = POOLS.get(pool, pool), sum(e.count for e in events)
    shown = named if everything or len(named) <= 2 * MOST else named[:MOST]
    hidden = sum(e.count - len(e.pages) for e in events) + len(named) - len(shown)
    if hidden:
        return f"{count:,} {name} pages ({ranges(shown)} and {hidden:,} more)"
    again = f" ({count:,} in all)" if count > len(named) else ""
    return f"{name} page{'s' * (len(named) != 1)} {ranges(shown)}{again}"


def _word(event: PageEvent) -> str:
    if event.kind in GIVES:
        return "took"
    if behind(event):
        return "evicted behind its window"
    if _by_cache(event):
        return BY_CACHE
    return {"free": "gave back", "evict": "evicted"}.get(event.kind, event.kind)


def _folded(moments: Sequence[Moment]) -> Iterator[Moment]:
    """Long rows of chunks become one moment; the first and the last of them stay."""
    row: list[Moment] = []
    for moment in [*moments, None]:
        if moment is not None and moment.kind == "chunk":
            row.append(moment)
            continue
        yield from row if len(row) <= MOST else (row[0], _one(row[1:-1]), row[-1])
        row = []
        if moment is not None:
            yield moment


def _one(row: Sequence[Moment]) -> Moment:
    events = [e for m in row for e in m.events]
    text = f"{len(row)} more chunks (--all shows them)"
    lines = list(_told(events, everything=False))
    return Moment(row[0].first, row[-1].last, row[0].at, "chunk", text, lines, events)
