"""What a tracer can judge, as it is: limits, off, dead hooks, counts; each change is told once."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest

from g4debug.findings.status import LEDGER, MAX_LIMITS, Checked, Limit, TracerStatus
from g4debug.findings.steps import Recorder


@pytest.fixture
def recorder():
    made = Recorder(4)
    made.status.part("page-table").mode = "raise"
    return made


@pytest.fixture
def part(recorder):
    return recorder.status.part("page-table")


def test_a_part_that_nothing_was_said_about_is_sound(part):
    record = part.record()
    assert (record.sound, record.state, record.audited) == (True, "armed: raise", -1)


def test_a_limit_is_told_in_one_line_once(recorder, part, caplog):
    for _ in range(3):
        part.limit("ranges only", "pages move")
    assert caplog.messages == ["g4debug: page-table is limited: ranges only: pages move"]
    recorder.count()
    part.limit("ranges only", "prefill runs elsewhere")
    assert len(caplog.messages) == 2
    record = part.record()
    assert record.limits == (Limit("ranges only", "pages move; prefill runs elsewhere", 0),)
    assert record.state == (
        "armed: raise; limited: ranges only (pages move; prefill runs elsewhere)"
    )


def test_off_says_since_when_and_only_the_first_reason_counts(recorder, part, caplog):
    for _ in range(7):
        recorder.count()
    part.off("the device is lost")
    recorder.count()
    part.off("another reason")
    part.limit("no tables", "it is off anyway")
    assert caplog.messages == ["g4debug: page-table is off since step 7: the device is lost"]
    assert part.record().state == "off since step 7: the device is lost"
    assert not part.record().sound


def test_a_failure_of_ours_has_its_traceback_in_the_log(part, caplog):
    try:
        raise KeyError("ours")
    except KeyError as e:
        part.limit("its hook x is off", "it failed: KeyError: 'ours'", e)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "Traceback" in caplog.text
    assert "please report it" in caplog.text


def test_limits_that_are_made_anew_in_every_step_stay_few(part, caplog):
    for n in range(10 * MAX_LIMITS):
        part.limit(f"row {n}", "a bug")
        part.limit("row 0", f"reason {n}")
    assert len(part.record().limits) == MAX_LIMITS
    assert len(part.record().limits[0].why) < 100 * MAX_LIMITS
    assert len(caplog.records) < 3 * MAX_LIMITS


def test_what_was_checked_is_counted_by_its_name_with_the_last_step(recorder, part):
    part.checked(what="tables")
    recorder.count()
    part.checked(3, "tables")
    part.checked(what="steps")
    recorder.count()
    assert part.record().checked == (Checked("tables", 4, 1), Checked("steps", 1, 1))


def test_a_count_is_no_change(recorder, part):
    before = recorder.status.changes
    part.checked()
    assert recorder.status.changes == before
    part.limit("x", "y")
    assert recorder.status.changes > before


def test_findings_are_counted_for_their_own_tracer(recorder, part):
    recorder.status.found("page-table", "negative")
    recorder.status.found("page-table", "negative")
    recorder.status.found("pool-leak", "leaked")
    assert part.record().findings == {"negative": 2}


def test_dead_hooks_are_in_the_status_until_they_run_again(recorder, part, caplog):
    """Whoever looked at the hooks says it in the log, once for all parts."""
    part.audited({})
    assert part.record().audited == 0
    recorder.count()
    dead = {"attn.trtllm_mha.layer_page_table": "somebody took it away"}
    before = recorder.status.changes
    part.audited(dead)
    part.audited(dead)
    assert recorder.status.changes == before + 1
    assert part.record().audited == 1
    assert part.record().state == (
        "armed: raise; its hook does not run at attn.trtllm_mha.layer_page_table: "
        "somebody took it away"
    )
    assert not part.record().sound
    part.audited({})
    assert part.record().sound
    assert caplog.messages == []


def test_who_needs_the_ledger_goes_with_it_and_one_line_says_who(recorder, part, caplog):
    ledger = recorder.status.part(LEDGER)
    other = recorder.status.part("kv-allocator")
    other.mode = "raise"
    part.depends_on(ledger, "ranges only")
    other.depends_on(ledger, "")
    recorder.count()
    ledger.off("it failed")
    assert caplog.messages == [
        "g4debug: the page ledger is off since step 1: it failed; "
        "so page-table is limited: ranges only, kv-allocator is off"
    ]
    assert part.record().limits == (Limit("ranges only", "the page ledger is off: it failed", 1),)
    assert other.record().state == "off since step 1: the page ledger is off: it failed"


def test_tracers_come_first(recorder):
    recorder.status.part(LEDGER).checked(what="events")
    recorder.status.part("step-recorder")  # nothing to say about it
    recorder.status.part("pool-leak").mode = "log"
    assert [r.name for r in recorder.status.records()] == ["page-table", "pool-leak", LEDGER]


def test_a_limit_that_is_over_is_told_once(part, caplog):
    part.limit("ranges only", "pages move", quiet=True)
    for _ in range(2):
        part.lift("ranges only", "they lie still")
    assert caplog.messages == ["g4debug: page-table is not limited any more: they lie still"]
    assert part.record().sound


def test_nothing_to_judge_is_no_limit_and_is_told(recorder, part):
    part.nothing("this server runs no draft")
    record = part.record()
    assert (record.sound, record.off) == (True, "")
    assert record.state == "armed: raise; nothing to judge: this server runs no draft"
    other = recorder.status.part("rank-divergence")
    other.mode = "raise"
    other.nothing("there is one rank only", off=True)
    assert other.record().sound
    assert other.is_off
    assert other.record().state == "nothing to judge: there is one rank only"


def test_what_the_documentation_says_of_every_such_server_is_no_failure(recorder, part):
    """But only as long as something is judged, and nothing else is wrong."""
    part.limit("only lengths", "not on GPUs", documented=True)
    record = part.record()
    assert (record.sound, record.whole) == (True, False)
    assert record.state == "armed: raise; limited, as documented: only lengths (not on GPUs)"
    assert recorder.status.judged() == "Judged: nothing in full. In part: page-table (only lengths)"
    part.limit("only lengths", "a hook failed")
    assert not part.record().sound
    other = recorder.status.part("spec-lifecycle")
    other.mode = "raise"
    other.off("not on GPUs", documented=True)
    record = other.record()
    assert (record.sound, record.declined) == (False, True)
    assert record.state == "off, as documented: not on GPUs"


def test_a_tracer_that_goes_off_later_says_why_although_it_had_little_to_judge(recorder, part):
    part.nothing("no draft, because this server runs none")
    part.off("none of its hooks runs any more")
    record = part.record()
    assert not record.sound
    assert record.state == "off: none of its hooks runs any more"
    assert recorder.status.judged() == (
        "Judged: nothing in full. Not judged: page-table (none of its hooks runs any more)"
    )


def test_one_line_says_what_is_judged_in_this_server(recorder, part):
    names = ("kv-allocator", "pool-leak", "spec-lifecycle", "kv-writes", "rank-divergence")
    for name in names:
        recorder.status.part(name).mode = "raise"
    recorder.status.part("pool-leak").limit("ranges only", "pages move")
    recorder.status.part("spec-lifecycle").nothing("no draft")
    recorder.status.part("rank-divergence").nothing("there is one rank only", off=True)
    recorder.status.part("kv-writes").off("no pool that it knows")
    assert recorder.status.judged() == (
        "Judged: page-table, kv-allocator, spec-lifecycle (no draft). In part: pool-leak (ranges "
        "only). Not judged: kv-writes (no pool that it knows). Nothing to judge: rank-divergence "
        "(there is one rank only)"
    )


def test_a_part_as_plain_data_is_what_dataclasses_make_of_it():
    part = TracerStatus(
        "page-table",
        "raise",
        limits=(Limit("ranges only", "no ledger", 3, True), Limit("nothing", "why")),
        dead=("kv.set: replaced",),
        checked=(Checked("tables", 7, 2),),
        findings={"stale-page": 2},
        silent=("decode",),
    )
    plain = part.plain()
    assert json.dumps(plain) == json.dumps(dataclasses.asdict(part))
    plain["findings"]["stale-page"] = 0
    assert part.findings == {"stale-page": 2}
