"""What a replay may say: never more than what was compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4debug.findings import tape
from g4debug.findings.record import (
    Finding,
    Location,
    PageEvent,
    Pool,
    Step,
    Table,
    Tape,
    TrapRecord,
)
from g4debug.findings.status import Limit, TracerStatus
from g4debug.findings.tape import Code, Recording, Why
from g4debug.findings.tape_record import data, pack
from g4debug.replay.host import Outcome
from g4debug.replay.setting import RELEASES, CannotReplay, Setting, recording_of, setting_of
from g4debug.replay.verdict import NOTHING, OTHERWISE, REPRODUCED, judge
from g4debug.replay.workload import BEHIND

pytestmark = pytest.mark.once("verdicts are made without SGLang")
ROOT = Path(__file__).parents[2]
STEPS = 70
FACTS = {
    "page_size": 16, "size": 320, "size_full": 640, "size_swa": 320, "sliding_window_size": 127,
    "max_running_requests": 8, "max_prefill_tokens": 512, "chunked_prefill_size": 128,
    "enable_overlap": True, "schedule_policy": "fcfs", "speculative_algorithm": None,
}  # fmt: skip


def taped(other: int = 0, pages: int = 0, steps: int = STEPS, why: Why = Why.START) -> bytes:
    """A tape; from step ``other`` on what the host knows is different, at ``pages`` the digest."""
    parts = [bytes((Code.START, why)) + tape.start(0, 0, 0, 0, 0.7, 0)]
    parts.append(tape.request(1, 3, 5, 0, -1, 0))
    for step in range(1, steps + 1):
        checksum = step + (1000 if other and step >= other else 0)
        parts.append(bytes((Code.STEP,)) + checksum.to_bytes(2, "little"))
        if step in (1, 64):
            digest = step + (9 if step == pages else 0)
            numbers = tape.number(step) + digest.to_bytes(8, "little")
            parts.append(bytes((Code.PAGES,)) + numbers)
    return b"".join(parts)


ARMED = tuple(
    TracerStatus(name, mode="raise") for name in ("flight-recorder", "kv-allocator", "page-table")
)


def tape_of(events: bytes, limits: tuple[str, ...] = (), **facts: Any) -> Tape:
    return pack([events], b"", 16, False, STEPS, 1, {**FACTS, **facts}, dict.fromkeys(limits, -1))


def one_pool(**facts: Any) -> Tape:
    """Of a server without sliding layers."""
    none = dict.fromkeys(("size_full", "size_swa", "sliding_window_size"))
    return tape_of(taped(), **{**none, **facts})


def finding(step: int = STEPS, **changes: Any) -> Finding:
    at = {"step": step, "forward_mode": "DECODE", "row": 1, "column": 2, **changes.pop("at", {})}
    known = Finding(
        check="page-table",
        kind="stale",
        site="attn.x",
        headline="g4debug: page-table: page 9",
        location=Location(**at),
        expected="",
        got="",
    )
    return dataclasses.replace(known, **changes)


def record(found: Finding, page: int = 9, events: bool = True, **changes: Any) -> TrapRecord:
    table = Table(
        values=np.ones((2, 3), dtype=np.int64),
        seq_lens=np.ones(2, dtype=np.int64),
        first_live=np.zeros(2, dtype=np.int64),
        bad=np.array([[1, 2, page]]),
        pool=Pool("full", 41, 16, 640),
    )
    steps = [Step(n, "DECODE", ("a",), (n,), rows=(3,)) for n in range(30, STEPS + 1)]
    happened = [PageEvent(n, "decode", "full", (n,), 1) for n in range(40, STEPS + 1)]
    return dataclasses.replace(
        TrapRecord(
            finding=found,
            created="2026",
            versions={"sglang": "0.5.23"},
            geometry={"context_len": 2048},
            tracers=ARMED,
            steps=tuple(steps),
            allocator=tuple(happened) if events else (),
            table=table,
        ),
        **changes,
    )


def outcome(events: bytes, *records: TrapRecord, last: TrapRecord, **changes: Any) -> Outcome:
    on = tape.read(events, 16, False)
    made = Outcome("tape", "", on, dict(FACTS), records, last, 0, 1.0)
    return dataclasses.replace(made, **changes)


THERE = record(finding())
ASKED = record(finding(check="flight-recorder", kind="asked"))


def told(
    there: TrapRecord, on: Tape, *here: TrapRecord, events: bytes = b"", **changes: Any
) -> Any:
    last = changes.pop("last", here[-1] if here else there)
    until = changes.pop("until", 0)
    elsewhere = changes.pop("elsewhere", ())
    found = outcome(events or taped(), *here, last=last, **changes)
    return judge(there, on, tape.read(data(on), 16, False), found, until, elsewhere)


def test_the_same_finding_with_all_states_equal_is_reproduced() -> None:
    verdict = told(THERE, tape_of(taped()), THERE, ended="raised")
    assert verdict.code == REPRODUCED
    assert verdict.text.startswith("reproduced: g4debug: page-table")
    assert "70 of 70 steps are equal" in verdict.more[0]
    assert "nothing that a GPU computes" in verdict.more[1]


@pytest.mark.parametrize(
    "here",
    [
        record(finding(STEPS - 1)),
        record(finding(kind="free")),
        record(finding(check="kv-allocator")),
        record(finding(at={"row": 0})),
        record(finding(at={"column": 1})),
        record(finding(at={"forward_mode": "EXTEND"})),
        record(finding(), page=8),
    ],
    ids=["step", "kind", "tracer", "row", "column", "mode", "page"],
)
def test_another_finding_is_not_the_same_one(here: TrapRecord) -> None:
    verdict = told(THERE, tape_of(taped()), here)
    assert (verdict.code, verdict.text) == (OTHERWISE, "not reproduced: another finding came")


def test_nothing_found_and_all_states_equal_is_innocence() -> None:
    verdict = told(THERE, tape_of(taped()))
    assert (verdict.code, verdict.text) == (OTHERWISE, "not reproduced, states equal")
    assert "innocent" in verdict.more[1]


def crashed(**changes: Any) -> Finding:
    return finding(**{"check": "flight-recorder", "kind": "exception", **changes})


def blind(name: str, **changes: Any) -> tuple[TracerStatus, ...]:
    return tuple(dataclasses.replace(t, **changes) if t.name == name else t for t in ARMED)


NEVER = Limit("ranges only", "it was never run with this backend")


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        ({}, ARMED[:2], "page-table was not armed"),
        ({}, blind("page-table", mode=""), "page-table was not armed"),
        ({}, blind("page-table", limits=(NEVER,)), "ranges only (it was never run"),
        ({}, blind("page-table", off="it failed"), "(off: it failed)"),
        ({}, blind("page-table", off="no table", nothing="no table"), "nothing to judge: no table"),
        ({}, blind("page-table", silent=("since step 3",)), "judges nothing since step 3"),
        ({"found": crashed()}, ARMED[:1], "kv-allocator was not armed"),
        ({"found": crashed(kind="cuda-error")}, ARMED[:2], "page-table was not armed"),
        ({"found": crashed(kind="other-rank")}, ARMED, "outside of this scheduler"),
        ({"found": crashed(kind="oom-killed")}, ARMED, "outside of this scheduler"),
        ({"found": finding(check="rank-divergence", kind="ranks-differ")}, ARMED, "several ranks"),
        ({"faults": ("token-oob #1",)}, ARMED, "a fault was injected there"),
    ],
)
def test_nobody_is_innocent_where_nobody_looked(
    there: dict[str, Any], here: tuple[TracerStatus, ...], why: str
) -> None:
    record_there = record(**{"found": finding(), **there})
    last = dataclasses.replace(record_there, tracers=here)
    verdict = told(record_there, tape_of(taped()), last=last)
    assert (verdict.code, verdict.text) == (NOTHING, "cannot be told: nothing was found here")
    assert why in " ".join(verdict.more)
    assert "innocent" not in " ".join(verdict.more)


def test_who_calls_the_host_innocent_of_a_crash_has_looked_at_pages() -> None:
    verdict = told(record(crashed()), tape_of(taped()))
    assert (verdict.code, verdict.text) == (OTHERWISE, "not reproduced, states equal")


def test_innocence_names_what_ran_there_and_not_here() -> None:
    there = having(
        arguments={"decode_attention_backend": "fa3", "attention_backend": "triton", "tp_size": 4},
        defaults={"disable_cuda_graph": False, "device": "cuda"},
    )
    made = started(there)
    names = "the attention backend fa3, CUDA graphs, 4 tensor-parallel ranks"
    assert ", ".join(made.elsewhere) == names
    assert "CUDA graphs were on, and nothing is captured here" in made.notes
    verdict = told(there, tape_of(taped()), elsewhere=made.elsewhere)
    assert f"Look also at what ran there and not here: {names}." in verdict.more
    plain = started(having(defaults={"disable_cuda_graph": False, "device": "cpu"}))
    assert plain.elsewhere == ()


def stopped_at_once(kind: str, step: int = 0) -> TrapRecord:
    """A server that had a request, and began no step."""
    site = "scheduler.run_event_loop"
    found = finding(step, check="flight-recorder", kind=kind, site=site)
    return record(found, steps=(), allocator=(), tape=tape_of(taped(steps=0)))


@pytest.mark.parametrize("kind", ["hang", "starved", "exception"])
def test_a_server_that_stopped_before_its_first_step_is_replayed(kind: str) -> None:
    there = stopped_at_once(kind)
    on, recording = recording_of(there)
    assert recording.steps == 0
    verdict = told(there, on, there, events=taped(steps=0))
    assert verdict.code == REPRODUCED
    assert verdict.text.startswith("reproduced: ")
    assert verdict.more[0].startswith("It had the requests, and began no step there")


def test_a_hang_right_behind_a_flush_is_reproduced() -> None:
    """The server names its last step, from before the flush; in the replay there was none."""
    there, here = stopped_at_once("hang", step=500), stopped_at_once("hang", step=-1)
    there = dataclasses.replace(there, tape=dataclasses.replace(there.tape, first=500))
    on, _ = recording_of(there)
    assert told(there, on, here, events=taped(steps=0)).code == REPRODUCED


@pytest.mark.parametrize("kind", ["hang", "starved", "exception"])
@pytest.mark.parametrize("steps", [0, STEPS])
def test_nobody_is_innocent_of_whom_no_step_was_compared(kind: str, steps: int) -> None:
    there = stopped_at_once(kind)
    on, _ = recording_of(there)
    verdict = told(there, on, events=taped(steps=steps))
    assert verdict.code == NOTHING
    assert verdict.text.startswith("cannot be told: ")
    assert "innocent" not in " ".join(verdict.more)


def test_without_a_step_or_a_request_nothing_is_replayed() -> None:
    start = bytes((Code.START, Why.START)) + tape.start(0, 0, 0, 0, 0.7, 0)
    for there in (
        dataclasses.replace(stopped_at_once("hang"), tape=tape_of(start)),
        dataclasses.replace(ASKED, tape=tape_of(taped(steps=0))),
    ):
        assert "there is no step on its tape" in refused(there)


@pytest.mark.parametrize("kind", ["hang", "starved"])
def test_nobody_is_innocent_who_hung_there_and_does_not_here(kind: str) -> None:
    there = record(finding(check="flight-recorder", kind=kind, site="scheduler.run_event_loop"))
    verdict = told(there, tape_of(taped()))
    assert verdict.code == NOTHING
    assert verdict.text.startswith("cannot be told: here ")
    assert "innocent" not in " ".join(verdict.more)


def test_nobody_is_innocent_whose_pages_are_not_known() -> None:
    there = record(finding(), events=False)
    verdict = told(there, tape_of(taped()))
    assert verdict.code == NOTHING
    assert "known up to step 64 only" in verdict.more[1]


@pytest.mark.parametrize(
    ("events", "step"), [(taped(other=20), 20), (taped(pages=64), 64), (taped(steps=50), 51)]
)
def test_states_that_differ_say_nothing_whatever_was_found(events: bytes, step: int) -> None:
    on = tape_of(taped())
    for here in ((), (THERE,)):
        verdict = told(THERE, on, *here, events=events)
        assert verdict.code == NOTHING
        assert verdict.text == f"states differ from step {step} of {STEPS} on"
        assert verdict.states.differs == step


def test_pages_that_differ_behind_the_last_digest_are_seen_in_the_events() -> None:
    events = list(THERE.allocator)
    events[-3] = dataclasses.replace(events[-3], pages=(5,))
    verdict = told(THERE, tape_of(taped()), last=record(finding(), allocator=tuple(events)))
    assert verdict.text == f"states differ from step {STEPS - 2} of {STEPS} on"


@pytest.mark.parametrize("gone", [STEPS - 1, STEPS - 3])
def test_events_that_one_of_them_lacks_are_seen_up_to_the_last_step(gone: int) -> None:
    """From this step on the replay's allocators did nothing more."""
    events = tuple(e for e in THERE.allocator if e.step < gone)
    verdict = told(THERE, tape_of(taped()), last=record(finding(), allocator=events))
    assert verdict.text == f"states differ from step {gone} of {STEPS} on"
    later = told(record(finding(), allocator=events), tape_of(taped()), last=THERE)
    assert later.text == f"states differ from step {gone} of {STEPS} on"


@pytest.mark.parametrize(("first", "known"), [(63, True), (64, False)])
def test_no_page_is_known_between_the_last_digest_and_the_first_event(
    first: int, known: bool
) -> None:
    """The oldest step of the events may not have all of them, and the last digest is of step 64."""
    events = tuple(e for e in THERE.allocator if e.step >= first)
    verdict = told(record(finding(), allocator=events), tape_of(taped()))
    assert verdict.code == (OTHERWISE if known else NOTHING)
    if not known:
        assert "known up to step 64 only" in verdict.more[1]
        assert f"events of the allocators from step {first + 1} on" in verdict.more[1]


def test_lengths_and_rows_that_differ_are_seen() -> None:
    steps = list(THERE.steps)
    steps[-2] = dataclasses.replace(steps[-2], rows=(4,))
    verdict = told(THERE, tape_of(taped()), last=record(finding(), steps=tuple(steps)))
    assert verdict.text == f"states differ from step {STEPS - 1} of {STEPS} on"
    assert "rows was (3,), and is (4,) here" in verdict.more[0]


def test_a_server_without_a_finding() -> None:
    """Nothing was reproduced then, and nobody is innocent of what nobody saw."""
    on = tape_of(taped())
    quiet = told(ASKED, on, elsewhere=("the attention backend fa3", "CUDA graphs"))
    assert quiet.code == REPRODUCED
    assert quiet.text == "nothing was found, there or here: 70 of 70 steps are equal"
    assert quiet.more[0] == "The scheduler decided the same in each step."
    assert quiet.more[1] == (
        "These tracers looked here: flight-recorder, kv-allocator, page-table."
    )  # fmt: skip
    (proof,) = quiet.more[2:]
    assert proof.startswith("That is no proof that all was right there: if its answers were wrong")
    assert proof.endswith(
        "memory, and what ran there and not here: the attention backend fa3, CUDA graphs."
    )
    assert "innocent" not in " ".join((quiet.text, *quiet.more))
    found = told(ASKED, on, THERE)
    text = f"found here, in step {STEPS}: g4debug: page-table: page 9"
    assert (found.code, found.text) == (OTHERWISE, text)


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (blind("page-table", limits=(NEVER,)), "But page-table did not look at all of it here ("),
        (
            blind("page-table", off="no table", nothing="no table"),
            "These tracers looked here: flight-recorder, kv-allocator.",
        ),
        (blind("page-table", mode=""), "These tracers looked here: flight-recorder, kv-allocator."),
        (None, "But the replay left no dump that says who looked."),
    ],
)
def test_where_nothing_was_found_it_is_told_who_looked(
    here: tuple[TracerStatus, ...] | None, says: str
) -> None:
    last = None if here is None else dataclasses.replace(ASKED, tracers=here)
    quiet = told(ASKED, tape_of(taped()), last=last)
    assert quiet.text.startswith("nothing was found, there or here: ")
    assert any(line.startswith(says) for line in quiet.more), quiet.more


def test_what_stops_the_replay_early_is_told_with_the_states_up_to_there() -> None:
    """There nobody looked, or it was found later; here a tracer stops the scheduler."""
    early = record(finding(50))
    for there in (ASKED, record(finding(check="flight-recorder", kind="exception"))):
        got = told(there, tape_of(taped()), early, events=taped(steps=50), ended="raised")
        assert "in step 50" in got.text
        assert got.more[0].startswith("50 of 50 steps are equal")
    differs = told(ASKED, tape_of(taped(other=20)), early, events=taped(steps=50), ended="raised")
    assert differs.text == "states differ from step 20 of 50 on"
    later = told(THERE, tape_of(taped()), early, events=taped(steps=50), ended="raised")
    assert (later.code, later.text) == (OTHERWISE, "not reproduced: another finding came")


@pytest.mark.parametrize("there", [THERE, ASKED, record(finding(), events=False)])
def test_what_was_not_replayed_is_neither_reproduced_nor_innocent(there: TrapRecord) -> None:
    verdict = told(there, tape_of(taped()), events=taped(steps=43), until=40)
    n = f"40 of {STEPS} steps are equal"
    said = f"equal up to step 40: {n}, and nothing was found up to there"
    assert (verdict.code, verdict.text, verdict.states.equal) == (REPRODUCED, said, 40)
    assert verdict.more[-1].startswith("What came after step 40 was not replayed")
    assert (there.finding.headline in verdict.more[-1]) == (there is not ASKED)
    assert "innocent" not in " ".join(verdict.more)
    assert "no proof" not in " ".join(verdict.more)  # nobody expects one of a part


def test_what_differs_or_is_found_behind_the_last_step_that_was_asked_for_does_not_count() -> None:
    on, late = tape_of(taped()), record(finding(42))
    for changes in ({"events": taped(other=41, steps=43)}, {"events": taped(pages=64)}):
        assert told(THERE, on, until=40, **changes).text.startswith("equal up to step 40")
    steps = [dataclasses.replace(s, rows=(4,)) if s.step > 40 else s for s in THERE.steps]
    last = record(finding(), steps=tuple(steps))
    assert told(THERE, on, until=40, last=last).text.startswith("equal up to step 40")
    events = taped(steps=42)
    found = told(THERE, on, late, until=40, events=events, ended="raised")
    assert (found.code, found.found) == (REPRODUCED, None)


def test_what_is_told_up_to_the_last_step_that_was_asked_for() -> None:
    on = tape_of(taped())
    differs = told(THERE, on, until=40, events=taped(other=20))
    assert (differs.code, differs.text) == (NOTHING, "states differ from step 20 of 40 on")
    early = record(finding(30))
    found = told(THERE, on, early, until=40, events=taped(steps=30), ended="raised")
    assert (found.code, found.states.equal) == (OTHERWISE, 30)
    assert found.text.startswith("found here, in step 30: g4debug: page-table")
    same = told(early, on, early, until=40, events=taped(steps=30), ended="raised")
    assert (same.code, same.text) == (REPRODUCED, "reproduced: g4debug: page-table: page 9")


def test_a_tape_from_the_middle_says_nothing_up_to_a_step() -> None:
    verdict = told(THERE, tape_of(taped(why=Why.IDLE)), until=40)
    assert (verdict.code, verdict.text) == (NOTHING, "cannot be told: nothing was found here")


def test_a_death_without_a_finding_is_not_nothing() -> None:
    verdict = told(ASKED, tape_of(taped()), ended="raised", error="ValueError: x")
    assert (verdict.code, verdict.more[1]) == (OTHERWISE, "ValueError: x")


def test_a_crash_is_explained_by_what_a_tracer_finds() -> None:
    crash = finding(check="flight-recorder", kind="exception", got="RuntimeError in a.py:1 b")
    for step in (STEPS, STEPS - BEHIND):
        verdict = told(record(crash), tape_of(taped()), record(finding(step)))
        assert verdict.code == REPRODUCED
        assert verdict.text.startswith(f"explained: in step {step}, g4debug: page-table")
    again = told(record(crash), tape_of(taped()), record(crash))
    assert again.text.startswith("reproduced")
    other = dataclasses.replace(crash, got="ValueError in a.py:1 b")
    assert told(record(crash), tape_of(taped()), record(other)).code == OTHERWISE


@pytest.mark.parametrize(
    ("kind", "step"),
    [("exception", 3), ("exception", STEPS - BEHIND - 1), ("hang", STEPS), ("killed", STEPS)],
)
def test_what_is_found_long_before_or_explains_no_exception_is_not_the_cause(
    kind: str, step: int
) -> None:
    there = record(crashed(kind=kind, headline="g4debug: it ended"))
    verdict = told(there, tape_of(taped()), record(finding(step)))
    assert verdict.code == OTHERWISE
    assert verdict.text == f"found here, in step {step}: g4debug: page-table: page 9"
    assert f"There, in step {STEPS}: g4debug: it ended" in verdict.more
    assert "Whether the finding here is the cause of what came there was not tested." in (
        verdict.more
    )


def test_a_tape_from_the_middle_has_no_states() -> None:
    on = tape_of(taped(why=Why.IDLE))
    verdict = told(THERE, on, record(finding(), page=8), events=taped(other=3))
    assert verdict.code == REPRODUCED
    assert verdict.text.startswith("reproduced, on other pages")
    nothing = told(THERE, on)
    assert nothing.code == NOTHING
    assert "innocent" not in " ".join(nothing.more)


def test_another_scheduler_is_refused() -> None:
    verdict = told(THERE, tape_of(taped(), max_running_requests=9), THERE)
    assert verdict.code == NOTHING
    assert verdict.more == ("max_running_requests was 9, and is 8 here.",)


@pytest.mark.parametrize("ended", ["stuck", "late", "died"])
def test_a_replay_that_did_not_end_says_nothing(ended: str) -> None:
    gone = {"recording": None} if ended == "died" else {}
    assert told(THERE, tape_of(taped()), ended=ended, **gone).code == NOTHING


# --- what is not begun ----------------------------------------------------------------------------


def refused(there: TrapRecord) -> str:
    def begin() -> None:
        on, recording = recording_of(there)
        setting_of(there, on, recording)

    with pytest.raises(CannotReplay) as caught:
        begin()
    return str(caught.value)


def having(**changes: Any) -> TrapRecord:
    return dataclasses.replace(THERE, **{"tape": tape_of(taped()), **changes})


def started(there: TrapRecord) -> Setting:
    return setting_of(there, *recording_of(there))


def test_what_is_started() -> None:
    there = having(
        fixes={"draft-window": "applied: it has the bug", "page-clamp": "not-needed: it has not"},
        environment={
            "SGLANG_X": "1",
            "SGLANG_PLUGINS": "1",
            "G4DEBUG_FAULTS": "page-oob=on",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "os",
            "SGLANG_A=B": "1",
            "G4DEBUG_LEAK_STEPS": "9",
        },
        arguments={"disable_radix_cache": True, "attention_backend": "fa3", "tp_size": 4},
    )
    made = started(there)
    assert made.arguments["disable_radix_cache"] is True
    assert made.arguments["attention_backend"] == "trtllm_mha"
    assert "tp_size" not in made.arguments
    assert [note.split()[0] for note in made.notes] == [
        "attention_backend=fa3", "4", "SGLANG_EXTERNAL_MODEL_PACKAGE",
    ]  # fmt: skip
    assert {name for name in made.environ if name.startswith("SGLANG_")} == {"SGLANG_X"}
    assert made.environ["G4DEBUG_LEAK_STEPS"] == "9"
    assert made.environ["SGLANG_X"] == made.environ["G4DEBUG_FIX_DRAFT_WINDOW"] == "1"
    assert "SGLANG_PLUGINS" not in made.environ
    assert "G4DEBUG_FIX_PAGE_CLAMP" not in made.environ
    assert made.environ["G4DEBUG_FAULTS"] == "page-oob=on"
    assert (made.model.toy, made.model.window, made.model.context) == ("gemma-4", 128, 4096)
    assert not made.drafts
    size, ratio = made.arguments["max_total_tokens"], made.arguments["swa_full_tokens_ratio"]
    assert int(size * ratio) // 16 * 16 == 320


def test_faults_that_the_dump_does_not_show_are_told() -> None:
    """Until 1.0 a dump did not show those with "token" in their names."""
    made = started(having(environment={"G4DEBUG_FAULTS": "set"}, faults=("token-oob #1",)))
    assert "G4DEBUG_FAULTS" not in made.environ
    assert any(note.startswith("the faults that were injected there are") for note in made.notes)


def test_a_server_that_hung_is_given_less_time_to_hang() -> None:
    hung = finding(check="flight-recorder", kind="hang")
    environ = started(having(finding=hung)).environ
    assert environ["G4DEBUG_HANG_SECONDS"] == "2"
    assert "G4DEBUG_HANG_SECONDS" not in started(having()).environ


@pytest.mark.parametrize(("asked", "given"), [(None, None), (8, 8)])
def test_sglang_makes_the_swa_pool_of_a_server_without_a_prefix_cache_by_itself(
    asked: int | None, given: int | None
) -> None:
    """With max_running_requests 0.5.23 makes it for as many requests, else by the ratio."""
    arguments = {"disable_radix_cache": True, "max_running_requests": asked}
    made = started(having(arguments=arguments))
    assert made.arguments["max_running_requests"] == given
    with_it = started(having(arguments={"max_running_requests": asked}))
    assert with_it.arguments["max_running_requests"] == FACTS["max_running_requests"]


@pytest.mark.parametrize(
    ("facts", "served", "arguments"),
    [
        ({"kv_pool": "MHA"}, ("llama", "a toy Llama"), {"attention_backend": "trtllm_mha"}),
        ({}, ("llama", "a toy Llama"), {"attention_backend": "trtllm_mha"}),  # an older g4debug's
        ({"kv_pool": "MLA"}, ("deepseek", "a toy DeepSeek"), {"attention_backend": "triton"}),
        (
            {"kv_pool": "MHA", "sliding_window_size": 127},
            ("gemma-3", "a toy Gemma-3"),
            {"attention_backend": "trtllm_mha"},
        ),
    ],
)
def test_which_toy_stands_for_a_server_with_one_pool(
    facts: dict[str, Any], served: tuple[str, str], arguments: dict[str, Any]
) -> None:
    there = having(
        tape=one_pool(**facts),
        geometry={**THERE.geometry, "serves": "Qwen3ForCausalLM (MHA, no window)"},
    )
    made = started(there)
    assert (made.model.toy, made.model.name) == served
    (note,) = made.notes
    assert note == f"the model was Qwen3ForCausalLM (MHA, no window), and is {served[1]} here"
    assert made.arguments["max_total_tokens"] == 320
    assert "swa_full_tokens_ratio" not in made.arguments
    assert arguments.items() <= made.arguments.items()


def test_sglang_calls_multi_layer_eagle_eagle_and_what_the_server_ran_tells_it() -> None:
    serves = "Step3p5ForCausalLM (MHA, an SWA pool) on fa3, draft multi-layer EAGLE (one path)"
    told = {**THERE.geometry, "serves": serves}
    drafts = tape_of(taped(), speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    made = started(having(tape=drafts, geometry=told))
    assert (made.model.toy, made.model.draft) == ("mimo-v2", "multi-layer-eagle")
    assert (made.model.algorithm, made.model.window, made.drafts) == ("EAGLE", 128, True)
    assert made.notes == [f"the model was {serves}, and is a toy MiMo-V2 here"]
    pool = one_pool(speculative_algorithm="EAGLE")
    assert "multi-layer EAGLE was never replayed with one KV pool for" in refused(
        having(tape=pool, geometry=told)
    )
    old = having(tape=drafts, geometry=told, versions={"sglang": "0.5.18"})
    assert "algorithm multi-layer EAGLE was never" in refused(old)
    # What a dump says of itself is not enough: its scheduler had no draft.
    assert started(having(geometry=told)).model.draft == ""


ENDED = ("killed", "oom-killed", "native-crash", "gone")


def killed(kind: str) -> TrapRecord:
    """As it is made of a black box."""
    return having(finding=finding(check="flight-recorder", kind=kind), tape=None)


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (having(tape=None), "has no tape: the server had not begun"),
        *((killed(kind), "which has none; a server that") for kind in ENDED),
        (having(tape=tape_of(taped(), ("LoRA adapters",))), "LoRA adapters"),
        (having(tape=tape_of(taped(steps=0))), "no step"),
        (having(tape=tape_of(taped() + b"\xee")), "damaged"),
        (
            having(versions={"sglang": "0.5.19"}),
            "of SGLang 0.5.19, and dumps of these releases only are replayed: "
            + ", ".join(RELEASES),
        ),
        (having(tape=tape_of(taped(), speculative_algorithm="EAGLE3")), "EAGLE3 was never"),
        (having(tape=one_pool(size=None)), "size is None"),
        (having(tape=one_pool(), versions={"sglang": "0.5.18"}), "replayed on 0.5.23 only"),
        (having(tape=one_pool(speculative_algorithm="MEDUSA")), "MEDUSA was never"),
        (having(tape=tape_of(taped(), speculative_algorithm="EAGLE")), "divided for sliding"),
        (
            having(tape=one_pool(kv_pool="MLA", speculative_algorithm="EAGLE")),
            "EAGLE was never replayed with a KV pool of MLA",
        ),
        (
            having(tape=one_pool(kv_pool="MLA", sliding_window_size=127)),
            "sliding layers with a KV pool of MLA",
        ),
        (
            having(tape=one_pool(sliding_window_size=127, speculative_algorithm="NGRAM")),
            "NGRAM was never replayed with sliding layers that share",
        ),
        (having(tape=one_pool(page_size=64)), "pages of 16 tokens, and its scheduler had 64"),
        (having(tape=one_pool(speculative_eagle_topk=4)), "several draft paths"),
        (having(geometry={}), "context_len"),
        (having(tape=tape_of(taped(), size_full=1 << 40)), "size_full"),
        (having(tape=dataclasses.replace(tape_of(taped()), format=9)), "format 9"),
    ],
)
def test_what_cannot_be_replayed_is_said(there: TrapRecord, why: str) -> None:
    assert why in refused(there)


def test_the_page_names_the_releases_whose_dumps_are_replayed() -> None:
    page = " ".join((ROOT / "docs" / "replay.md").read_text().split())
    assert f"Dumps of these releases are replayed: {', '.join(RELEASES)}." in page


def test_a_tape_of_more_tokens_than_can_be_made_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("g4debug.replay.setting.MOST_GIVEN", 2)
    assert "its requests have 3 tokens, at most 2" in refused(having())


def test_tapes_of_the_first_format_are_read() -> None:
    old = dataclasses.replace(tape_of(taped()), format=1)
    assert recording_of(having(tape=old))[1] == recording_of(having())[1]


def test_recordings_of_this_file_are_what_they_should_be() -> None:
    read: Recording = tape.read(taped(other=3), 16, False)
    assert (read.steps, read.fresh, read.pages) == (STEPS, True, {1: 1, 64: 64})
