"""Real servers that stand, and say so with the reason; and one that only looks so.

The workloads are in drive_standing.py. They run without our fixes.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from real_engine import ENGINE, drive
from watched_engine import engine

from g4debug.cli import main
from g4debug.hooking import targets

pytestmark = ENGINE
DRIVER = str(Path(__file__).with_name("drive_standing.py"))
HANG = 3
SETTINGS = {"G4DEBUG_FIXES": "none", "G4DEBUG_HANG_SECONDS": str(HANG)}
ALONE = {**SETTINGS, "G4DEBUG_TRACE": "flight-recorder"}


def test_a_chunk_that_is_never_admitted_is_told_with_the_reason(tmp_path, capsys):
    """sglang #36458. Meanwhile doctor shows it."""
    with engine(tmp_path, DRIVER, "parked_chunk", "30", **SETTINGS) as run:
        run.wait_for("the scheduler hangs")
        time.sleep(2)  # the status is told once in a second
        code = main(["doctor", "--pid", str(run.scheduler().pid), "--json"])
        told = json.loads(capsys.readouterr().out)
        run.wait_for("RESULT")
        (record,) = run.dumps()
        assert run.text.count("the scheduler hangs") == 1
    assert code == 1
    (process,) = (p for p in told["processes"] if p["role"] == "scheduler")
    assert process["stands"].startswith("it stands: no step for")
    (recorder,) = (t for t in process["tracers"] if t["name"] == "flight-recorder")
    assert recorder["mode"]  # so SGLang's /metrics has its findings, see test_metrics.py
    assert recorder["findings"] == {"hang": 1}
    (line,) = process["waits"]
    assert line.startswith("request long waits ")
    for text in (line, record.finding.got):
        assert "SWA pool: needs 512 for its next chunk, has 64" in text
        assert "704 are held by itself, 576 of them behind its sliding window" in text
    assert (record.finding.kind, record.finding.location.request) == ("hang", "long")
    assert "A deadlock. It lacks 1 token of the SWA pool" in record.finding.cause
    assert "sglang #36458" in record.finding.cause


@pytest.mark.long("two engines more")
@pytest.mark.once("who leads is decided alike on each release")
def test_two_tensor_parallel_ranks_that_stand_make_one_finding(tmp_path):
    run = drive(tmp_path, DRIVER, "parked_chunk_on_two_ranks", "12", **ALONE)
    assert run.result == {"long": "stands"}, run.log[-3000:]
    assert run.log.count("the scheduler hangs") == 1
    (record,) = run.dumps
    assert record.finding.location.rank == 0


@pytest.mark.skipif(not targets.matches("<0.5.18"), reason="this SGLang serves it")
def test_a_resume_that_lacks_its_own_prefix_is_told_with_the_reason(tmp_path):
    """sglang #32379."""
    run = drive(tmp_path, DRIVER, "resume", "15", **ALONE)
    assert run.result == {"turn-1": "served", "turn-2": "stands"}
    (record,) = run.dumps
    assert (record.finding.kind, record.finding.location.request) == ("hang", "turn-2")
    assert "SWA pool: needs 334 for 270 tokens, has 320" in record.finding.got
    assert "448 of them are the cached prefix of the request itself" in record.finding.got
    assert "what it lacks is its own cached prefix" in record.finding.cause
    assert "sglang #32379" in record.finding.cause


@pytest.mark.once("who waits is counted alike on each release")
def test_a_request_that_all_others_overtake(tmp_path):
    run = drive(
        tmp_path, DRIVER, "overtaken", **{**ALONE, "G4DEBUG_HANG_SECONDS": "2"},
        G4DEBUG_STARVED_STEPS="60",
    )  # fmt: skip
    assert set(run.result.values()) == {"served"}
    # Later some of the others may starve beside it: the policy does not keep their order.
    record = run.dumps[0]
    assert (record.finding.kind, record.finding.location.request) == ("starved", "unlike")
    assert "of the queue, as the policy lpm sorts it" in record.finding.got
    assert {r.finding.kind for r in run.dumps} == {"starved"}


@pytest.mark.once("who waits is counted alike on each release")
def test_what_only_looks_like_a_hang_is_not_told(tmp_path):
    """No traffic, pauses, a slow first step, a long prefill, a stopped client, new weights."""
    slow = f"delayed-step=1*on({3000 * HANG})"
    run = drive(
        tmp_path, DRIVER, "healthy", str(2 * HANG), **ALONE,
        G4DEBUG_STARVED_STEPS="150", G4DEBUG_FAULTS=slow,
    )  # fmt: skip
    assert set(run.result.values()) == {"served"}
    assert run.status == 0
    assert run.dumps == []


@pytest.mark.long("two engines more")
@pytest.mark.skipif(not targets.matches(">=0.5.23"), reason="it was run on 0.5.23 only")
def test_a_decode_server_of_disaggregation_that_is_healthy(tmp_path):
    run = drive(tmp_path, DRIVER, "received", str(2 * HANG), **ALONE, G4DEBUG_STARVED_STEPS="40")
    assert set(run.result.values()) == {"served"}
    assert run.dumps == []


@pytest.mark.long("two engines more")
@pytest.mark.skipif(not targets.matches(">=0.5.23"), reason="it was run on 0.5.23 only")
def test_a_decode_server_that_never_has_room_is_told_with_the_reason(tmp_path):
    run = drive(tmp_path, DRIVER, "no_room", "15", **ALONE)
    assert run.result == {"some": "served", "much": "stands", "again": "served"}
    (record,) = run.dumps
    assert (record.finding.kind, record.finding.location.request) == ("hang", "much")
    assert "SWA pool: needs 1600 to receive 100 tokens" in record.finding.got
    assert "it may generate (1500), has 768; 768 are free" in record.finding.got
    assert "A deadlock. No step can free enough: the SWA pool has 768" in record.finding.cause
