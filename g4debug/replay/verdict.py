"""Compares a replay with the dump that has the tape.

It says "reproduced" and "states equal" only about states that were compared. A tape that does not
begin with fresh pages has no comparable states: other pages are in use then, so it claims nothing
about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from g4debug.findings.kinds import Place, place_of
from g4debug.findings.record import Finding, Plain, Tape, TrapRecord
from g4debug.findings.tape import Recording
from g4debug.replay.host import Outcome
from g4debug.replay.workload import BEHIND

REPRODUCED, OTHERWISE, NOTHING = 0, 1, 2  # exit codes
RECORDER = "flight-recorder"
UNTOLD = "cannot be told: nothing was found here"
NO_STEP = "It had the requests, and began no step there"
NO_PROOF = "That is no proof that all was right there"
HANG = RECORDER, "hang"  # check and kind of a finding
# A crash tells of no page. Who calls the host innocent of it must have looked with both of these.
PAGES = "kv-allocator", "page-table"
FAULTY = "a fault was injected there, and whether it struck here is not known"


@dataclass(frozen=True)
class States:
    """The comparison of the states before each step.

    equal: so many steps are equal, from the first one on. differs: the first step that differs, 0
    if none does. since: the last step before it in which all pages are known to be equal. pages: in
    how many steps the places of all pages were compared and equal. last: the last such step.
    events: the first step from which on the allocators' events were compared, each with its pages;
    0 for none. exact: the last step up to which the places of pages are known so; 0 if events are
    missing between ``last`` and ``events``.
    """

    equal: int
    steps: int
    pages: int
    last: int = 0
    differs: int = 0
    since: int = 0
    what: str = ""
    exact: int = 0
    events: int = 0


def compare(recorded: Recording, replayed: Recording) -> States:
    steps = recorded.steps
    pairs = zip(recorded.checksums, replayed.checksums, strict=False)
    differs = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 0)
    what = "mode, requests, free tokens, queue or new tokens"
    if not differs and replayed.steps < steps:
        differs, what = replayed.steps + 1, "there was no such step"
    looked = sorted(recorded.pages.keys() & replayed.pages.keys())
    bad = next((n for n in looked if recorded.pages[n] != replayed.pages[n]), 0)
    if bad and (not differs or bad <= differs):
        differs, what = bad, "the order of the free lists, or the mapping to SWA pages"
    good = [n for n in looked if not differs or n < differs]
    equal = steps if not differs else differs - 1
    last = good[-1] if good else 0
    return States(equal, steps, len(good), last, differs, last if differs else 0, what)


def with_history(states: States, there: TrapRecord, first: int, here: TrapRecord) -> States:
    """The comparison, and for the last steps also a comparison of both dumps' details.

    These are the lengths of each request, its row, and the pages in each event of the allocator.
    first: the steps before the tape.
    """
    found = _first_other_step(there, first, here)
    begin, other = _compare_events(there, first, here)
    if other and (found is None or other < found[0]):
        found = other, "an event of the allocator, or its pages"
    if found is not None and (not states.differs or found[0] < states.differs):
        step, what = found
        return dataclasses.replace(states, equal=step - 1, differs=step, since=0, what=what)
    # The digest is of the beginning of its step. Before the first one a fresh server's pages are.
    known = bool(begin) and begin <= max(1, states.last) and not states.differs
    return dataclasses.replace(states, exact=states.steps if known else 0, events=begin)


STEP = (
    "forward_mode", "seq_lens", "spec_info", "full_used", "swa_used", "waiting", "rows",
    "committed", "allocated", "evicted",
)  # fmt: skip


def _first_other_step(there: TrapRecord, first: int, here: TrapRecord) -> tuple[int, str] | None:
    mine = {s.step: s for s in here.steps}
    for step in there.steps:
        other = mine.get(step.step - first)
        for name in STEP if other is not None else ():
            a, b = getattr(step, name), getattr(other, name)
            if a != b and () not in (a, b) and -1 not in (a, b):  # not known
                return step.step - first, f"{name} was {a}, and is {b} here"
    return None


def _compare_events(there: TrapRecord, first: int, here: TrapRecord) -> tuple[int, int]:
    """The first step for which both dumps have all events, and the first one in which they differ.

    0: there is none. For the last step one dump may have more events than the other: of both, the
    last one that had begun.
    """
    theirs, mine = _events(there, first), _events(here, 0)
    if not theirs or not mine:
        return 0, 0
    begin = max(min(theirs), min(mine)) + 1
    end = min(
        max([*theirs, *(s.step - first for s in there.steps)]),
        max([*mine, *(s.step for s in here.steps)]),
    )
    for step in range(begin, end + 1):
        pools = theirs.get(step, {}), mine.get(step, {})
        for name in sorted({*pools[0], *pools[1]}):
            a, b = (pool.get(name, []) for pool in pools)
            both = min(len(a), len(b)) if step == end else max(len(a), len(b))
            if a[:both] != b[:both]:
                return begin, step
    return begin, 0


def _events(record: TrapRecord, first: int) -> dict[int, dict[str, list[tuple[object, ...]]]]:
    """Step -> pool -> its events, in their order.

    Each pool for itself: with the unified cache of 0.5.23, which of the two gets an evicted page
    first was seen to differ from run to run, and their free lists do not depend on it.
    """
    found: dict[int, dict[str, list[tuple[object, ...]]]] = {}
    for e in record.allocator:
        of_pool = found.setdefault(e.step - first, {}).setdefault(e.pool, [])
        of_pool.append((e.kind, e.pages, e.count))
    return found


@dataclass(frozen=True)
class Verdict:
    """code: the exit code. text: the first line. more: further lines, in whole sentences."""

    code: int
    text: str
    more: tuple[str, ...] = ()
    states: States | None = None
    found: Finding | None = None  # in the replay


def judge(
    record: TrapRecord,
    on: Tape,
    recorded: Recording,
    outcome: Outcome,
    until: int = 0,
    elsewhere: Sequence[str] = (),
) -> Verdict:
    """The verdict of a replay on the finding of a dump. until: the tape's last step that is judged;
    0 for all. It says nothing about what came after. elsewhere: see ``Setting``."""
    if not until:
        return _judge(record, on, recorded, outcome, elsewhere)
    step, there = until + on.first, record.finding
    more = f"What came after step {step} was not replayed, so nothing is said of it."
    if there.kind != "asked" and there.location.step > step:
        more = f"{more[:-1]}, nor of what was found there in step {there.location.step}: "
        more += there.headline
        record = dataclasses.replace(
            record, finding=dataclasses.replace(there, check=RECORDER, kind="asked")
        )
    verdict = _judge(
        _first_steps(record, step),
        on,
        _first_of(recorded, until),
        _begin_of(outcome, until),
        elsewhere,
    )
    text = verdict.text
    if verdict.states is not None and verdict.code == REPRODUCED and verdict.found is None:
        n = f"{verdict.states.equal} of {recorded.steps} steps are equal"
        text = f"equal up to step {step}: {n}, and nothing was found up to there"
    kept = tuple(line for line in verdict.more if not line.startswith(NO_PROOF))  # of a part
    return dataclasses.replace(verdict, text=text, more=(*kept, more))


def _first_steps(record: TrapRecord, step: int) -> TrapRecord:
    """The history of a dump up to a step."""
    return dataclasses.replace(
        record,
        steps=tuple(s for s in record.steps if s.step <= step),
        allocator=tuple(e for e in record.allocator if e.step <= step),
    )


def _first_of(recorded: Recording, steps: int) -> Recording:
    return dataclasses.replace(
        recorded,
        checksums=recorded.checksums[:steps],
        pages={n: digest for n, digest in recorded.pages.items() if n <= steps},
    )


def _begin_of(outcome: Outcome, steps: int) -> Outcome:
    """What a replay has done up to a step. It may have ended later by itself."""
    records = tuple(r for r in outcome.records if r.finding.location.step <= steps)
    later = outcome.recording is not None and outcome.recording.steps > steps
    return dataclasses.replace(
        outcome,
        ended="tape" if later and not records else outcome.ended,
        records=records,
        last=None if outcome.last is None else _first_steps(outcome.last, steps),
    )


def _judge(
    record: TrapRecord,
    on: Tape,
    recorded: Recording,
    outcome: Outcome,
    elsewhere: Sequence[str],
) -> Verdict:
    if outcome.recording is None:
        return Verdict(NOTHING, f"cannot be replayed, because the scheduler {end_of(outcome)}")
    differs = list(_facts(on.scheduler, outcome.scheduler))
    if differs:
        return Verdict(
            NOTHING,
            "cannot be replayed, because the scheduler is not as it was",
            tuple(differs),
        )
    there = None if record.finding.kind == "asked" else record.finding
    seen = [(r, r.finding) for r in outcome.records]
    same = next(
        (f for r, f in seen if there is not None and _same(record, there, on, recorded, r, f)), None
    )
    like = next((f for _, f in seen if there is not None and alike(there, f)), None)
    first = seen[0][1] if seen else None
    if not recorded.fresh:
        return _of_unknown_pages(there, on, like, first)
    if first is not None and outcome.ended == "raised":
        # It was stopped here, so only what was before can be compared.
        at = max(1, min(outcome.recording.steps, first.location.step))
        if there is None or at < there.location.step - on.first:
            recorded = _first_of(recorded, at)
    states = compare(_up_to(recorded, there, on.first), outcome.recording)
    if outcome.last is not None:
        states = with_history(states, record, on.first, outcome.last)
    if states.differs:
        return _differ(there, states, like)
    if outcome.ended in ("stuck", "late"):
        return Verdict(NOTHING, f"cannot be replayed, because it {end_of(outcome)}", (), states)
    return _of_equal(record, there, on, states, same, like, first, outcome, elsewhere)


def _of_equal(
    record: TrapRecord,
    there: Finding | None,
    on: Tape,
    states: States,
    same: Finding | None,
    like: Finding | None,
    first: Finding | None,
    outcome: Outcome,
    elsewhere: Sequence[str],
) -> Verdict:
    """All states are equal."""
    n = f"{states.equal} of {states.steps} steps are equal" if states.steps else NO_STEP
    if outcome.ended == "raised" and first is None:
        text = "not reproduced: the scheduler died of something else"
        return Verdict(OTHERWISE, text, (_equal(n), outcome.error), states)
    if there is None:
        if first is None:
            text = f"nothing was found, there or here: {n}"
            more = tuple(_of_silence(outcome.last, elsewhere))
            return Verdict(REPRODUCED, text, more, states)
        text = f"found here, in step {first.location.step + on.first}: {first.headline}"
        return Verdict(OTHERWISE, text, (_equal(n),), states, first)
    if same is not None:
        why = "It depends on nothing that a GPU computes."
        if record.faults:
            why = "The faults that were injected there were injected here, too."
        return Verdict(REPRODUCED, f"reproduced: {same.headline}", (_equal(n), why), states, same)
    if there.check == RECORDER and first is not None and first.check != RECORDER:
        return _of_a_tracer(there, first, first.location.step + on.first, n, states, outcome)
    if like is not None or first is not None:
        found = like or first
        assert found is not None
        more = (
            _equal(n),
            f"There, in step {there.location.step}: {there.headline}",
            f"Here, in step {found.location.step + on.first}: {found.headline}",
        )
        return Verdict(OTHERWISE, "not reproduced: another finding came", more, states, found)
    if place_of(there) is Place.STANDS:
        text = "cannot be told: here nobody hangs or starves"
        why = (
            "What it waited for there may have been outside of the scheduler: a kernel, another "
            f"rank or server, the machine. {there.reference}".strip()
        )
        return Verdict(NOTHING, text, (_equal(n), why), states)
    unseen = unlooked(record, outcome.last) if states.steps else "no step could be compared"
    if unseen:
        why = f"That proves nothing, because {unseen}."
        return Verdict(NOTHING, UNTOLD, (_equal(n), why), states)
    if max(states.exact, states.last) < states.steps:
        why = f"Where the pages were is known up to step {states.last} only, because there are "
        if states.events:
            why += f"events of the allocators from step {states.events} on, and none before."
        else:
            why += "no events of the allocators; arm a tracer that uses the page ledger."
        return Verdict(NOTHING, UNTOLD, (_equal(n), why), states)
    innocent = [
        _equal(n),
        "The host's decisions are innocent: look at streams, kernels and memory.",
    ]
    if elsewhere:
        innocent.append(f"Look also at what ran there and not here: {', '.join(elsewhere)}.")
    if there.reference:
        innocent.append(there.reference)
    return Verdict(OTHERWISE, "not reproduced, states equal", tuple(innocent), states)


def _of_silence(here: TrapRecord | None, elsewhere: Sequence[str]) -> Iterator[str]:
    """What it says, and what not, that the server had no finding and its replay has none."""
    yield "The scheduler decided the same in each step."
    parts = () if here is None else here.tracers
    looked = tuple(part.name for part in parts if part.mode and not part.idle)
    if looked:
        yield f"These tracers looked here: {', '.join(looked)}."
    for name in looked or (RECORDER,):
        why = blind((name,), here)
        if why:
            yield f"But {why}."
    also = f", and what ran there and not here: {', '.join(elsewhere)}" if elsewhere else ""
    yield (
        f"{NO_PROOF}: if its answers were wrong, no tracer that looked sees why. Look at what a "
        f"replay does not have: the numbers that kernels compute, streams, memory{also}."
    )


def _of_a_tracer(
    there: Finding, first: Finding, step: int, n: str, states: States, outcome: Outcome
) -> Verdict:
    """There was no finding of a tracer's, and here is one, in this step of the server."""
    more = [_equal(n), f"There, in step {there.location.step}: {there.headline}"]
    near = abs(there.location.step - step) <= BEHIND
    if near and place_of(there) in (Place.CAUSE, Place.SURFACED):
        text = f"explained: in step {step}, {first.headline}"
        return Verdict(REPRODUCED, text, tuple(more), states, first)
    more.append("Whether the finding here is the cause of what came there was not tested.")
    if outcome.ended == "raised":
        more.append(f"The replay ended with it; by --trace without {first.check} it goes on.")
    text = f"found here, in step {step}: {first.headline}"
    return Verdict(OTHERWISE, text, tuple(more), states, first)


def unlooked(record: TrapRecord, here: TrapRecord | None) -> str:
    """Why a replay in which it does not come says nothing of a dump's finding, in words.

    '': somebody looked. here: the last dump of the replay.
    """
    there = record.finding
    if there.check == "rank-divergence":
        return "it is of several ranks, and one is replayed here"
    if place_of(there) not in (Place.CAUSE, Place.SURFACED):
        return "it may have come from outside of this scheduler, where nobody looks here"
    if record.faults:
        return FAULTY
    return blind(PAGES if there.check == RECORDER else (there.check,), here)


def blind(names: Iterable[str], here: TrapRecord | None) -> str:
    """Why these tracers have not looked at all of a replay, in words; '' if they have."""
    if here is None:
        return "the replay left no dump that says who looked"
    armed = {part.name: part for part in here.tracers if part.mode}
    for name in names:
        part = armed.get(name)
        if part is None:
            return f"{name} was not armed here"
        if part.idle or not part.sound:
            return f"{name} did not look at all of it here ({part.state})"
    return ""


def _equal(n: str) -> str:
    if n == NO_STEP:
        return f"{n}, and so there is nothing else to compare."
    return f"{n[0].upper()}{n[1:]}: the scheduler decided the same in each."


def _differ(there: Finding | None, states: States, like: Finding | None) -> Verdict:
    more = [f"Different: {states.what}."]
    if states.since:
        more.append(f"Up to step {states.since} all pages were at the same places.")
    if like is not None:
        more.append(f"A finding of the same kind came all the same: {like.headline}")
    more.append(
        "So this says nothing about the bug. Something decided there that is not on the tape: "
        "please report the launch command."
    )
    text = f"states differ from step {states.differs} of {states.steps} on"
    return Verdict(NOTHING, text, tuple(more), states, like)


def _of_unknown_pages(
    there: Finding | None, on: Tape, like: Finding | None, first: Finding | None
) -> Verdict:
    """The tape begins in the middle, so the pages at its beginning are not known."""
    why = (
        f"The tape begins with step {on.first + 1}, where the server was {on.begins}, not where "
        "it was new or flushed. So which pages were in use is not known, and states cannot be "
        "compared."
    )
    if like is not None:
        text = f"reproduced, on other pages: {like.headline}"
        return Verdict(REPRODUCED, text, (why,), None, like)
    if first is not None:
        more = (why, f"There: {there.headline}") if there is not None else (why,)
        return Verdict(OTHERWISE, f"found here: {first.headline}", more, None, first)
    return Verdict(NOTHING, UNTOLD, (why,))


def _up_to(recorded: Recording, there: Finding | None, first: int) -> Recording:
    """The steps up to the finding's: in log mode a server runs on after it."""
    if there is None or there.location.step <= first:
        return recorded
    return _first_of(recorded, there.location.step - first)


def _facts(there: dict[str, Plain], here: dict[str, Plain]) -> Iterator[str]:
    """The settings by which the two schedulers decide differently, a sentence each."""
    for name in sorted(there.keys() & here.keys()):
        if there[name] != here[name]:
            yield f"{name} was {there[name]}, and is {here[name]} here."


def hung(there: Finding) -> bool:
    """Whether the scheduler lived, and served nobody."""
    return (there.check, there.kind) == HANG


def first_alike(there: Finding, records: Iterable[TrapRecord]) -> TrapRecord | None:
    return next((r for r in records if alike(there, r.finding)), None)


def alike(there: Finding, here: Finding) -> bool:
    """The same thing went wrong, maybe with other pages, at another time."""
    a, b = there.location, here.location
    if (there.check, there.kind, there.site) != (here.check, here.kind, here.site):
        return False
    if there.check == RECORDER and there.kind == "exception":
        return _error_of(there) == _error_of(here)
    return (a.runner, a.layer_kind) == (b.runner, b.layer_kind)


def _error_of(finding: Finding) -> str:
    """Type and place of an exception: ``RuntimeError in sglang/srt/…:12 alloc``."""
    return finding.got.split("\n")[0]


def _same(
    record: TrapRecord,
    there: Finding,
    on: Tape,
    recorded: Recording,
    replayed: TrapRecord,
    here: Finding,
) -> bool:
    """The same thing went wrong, with the same pages, in the same step and row."""
    if not alike(there, here):
        return False
    if not recorded.steps:  # there it names the last step before the tape, and here there is none
        return True
    a, b = there.location, here.location
    return (
        a.step - on.first == b.step
        and (a.forward_mode, a.row, a.column) == (b.forward_mode, b.row, b.column)
        and pages(record) == pages(replayed)
    )


def pages(record: TrapRecord) -> tuple[object, ...]:
    """The pages that a finding is about, as far as its evidence names them."""
    bad = () if record.table is None else tuple(map(tuple, record.table.bad.tolist()))
    held = tuple((h.pool, h.pages, h.count, h.state) for h in record.holdings)
    last = tuple((e.kind, e.pool, e.pages, e.count) for e in record.events[-1:])
    return bad, held, last


def end_of(outcome: Outcome) -> str:
    """How a replay ended, in words."""
    return {
        "late": f"did not come to the end of the tape in {outcome.seconds:.0f} s",
        "large": f"was ended: {outcome.error}",
        "stuck": "stood still in the middle of the tape",
        "died": f"ended without a word: {outcome.error}",
        "raised": f"raised {outcome.error}",
    }.get(outcome.ended, "has left no tape")
