"""The flight recorder on real schedulers: dead device, SGLang's own crash, hang, healthy end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import releases
from real_engine import ENGINE, NOHUP, TERMINAL, WhenAsked
from watched_engine import HANG, LIMIT, Run, engine

pytestmark = [*ENGINE, pytest.mark.once("what it tests is the same code on every release")]
REPRO = Path(__file__).resolve().parents[3] / "repro"
SOON = 100  # what SIGTERM must not wait for takes 600; a busy machine is slow, too


def ended(folder: Path, *command: str, **environ: str) -> Run:
    with engine(folder, *command, **environ) as run:
        run.process.wait(LIMIT)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Those that end by themselves, two at a time."""
    folder = tmp_path_factory.mktemp("engine")
    dead = {"G4DEBUG_FAULTS": "seed=1;page-oob=1*on@mode=target_verify"}
    child = (str(REPRO / "harness" / "child.py"), "harness.engine", "cpu")
    served = json.dumps({"workload": "zero_accept_merge", "requests": 3})
    crash = (*child, str(folder / "result"), served)
    off = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0", "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
    some = {
        "dead": lambda: ended(folder / "dead", **dead),
        "healthy": lambda: ended(folder / "healthy"),
    }
    if releases.has_v1_worker():
        some["crash"] = lambda: ended(folder / "crash", *crash, **off)
    return WhenAsked(**some)


def test_a_dead_device_leaves_the_last_steps(runs):
    run = runs["dead"]
    assert run.process.returncode != 0
    (record,) = run.dumps()
    f = record.finding
    assert (f.check, f.kind) == ("flight-recorder", "cuda-error")
    assert "AcceleratorError: CUDA error: an illegal memory access was encountered" in f.headline
    assert "only where it surfaced" in f.got
    assert f.next_command.startswith("SGLANG_TRTLLM_MHA_DEBUG=1 ")
    last = record.steps[-1]
    assert last.step == f.location.step == len(record.steps)
    assert last.rids
    assert len(last.seq_lens) == len(last.rids) == len(last.rows) == len(last.allocated)
    assert all(n > 0 for n in last.allocated)
    assert record.steps[0].time_ns < last.time_ns
    assert {p.name for p in record.pools} == {"full", "swa"}
    assert all(p.used_tokens > 0 for p in record.pools)
    kv = [r for r in record.memory.kv if r.runner == "target"]
    sizes = {(p.name, p.pages) for p in record.pools}
    assert {(r.pool, r.pages) for r in kv} == sizes
    assert {r.part for r in kv} == {"K", "V"}
    assert {"req_to_token", "mapping", "weights"} <= {r.what for r in record.memory.ranges}
    # Said before SGLang's own words, which are what they would have been.
    assert run.text.index(f.headline) < run.text.index("Scheduler hit an exception")
    assert "torch.AcceleratorError: CUDA error" in run.text
    assert "TrapError" not in run.text


@pytest.mark.v1_worker
def test_sglangs_own_crash_is_dumped_and_goes_on(runs):
    """Seed PR #22's AttributeError, of SGLang as it is installed."""
    run = runs["crash"]
    assert run.process.returncode != 0
    (record,) = run.dumps()
    f = record.finding
    assert f.kind == "exception"
    assert "AttributeError: " in f.headline
    assert "FrozenKVMTPVerifyInput" in f.headline
    assert "sglang/srt/" in f.got
    assert any("merge_batch" in place for place in f.history)
    error = f.headline.partition("AttributeError: ")[2]
    assert run.text.count(f"AttributeError: {error}") == 2  # ours and SGLang's


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(TERMINAL, id="terminal"),
        pytest.param(NOHUP, id="nohup", marks=pytest.mark.long("the same, started another way")),
    ],
)
def test_sigterm_to_a_hung_scheduler_leaves_a_dump_and_kills(tmp_path, ignored):
    # After so few steps the pace of the server is not known, so nothing is told before SIGTERM.
    hang = {"G4DEBUG_FAULTS": "delayed-step=2*off->1*on(600000)"}
    with engine(tmp_path, ignored=ignored, **hang) as run:
        run.wait_for("delayed-step #1")
        time.sleep(2 * HANG + 3)  # of a second in which nobody ran only a part counts
        seconds = run.terminate_scheduler()
        assert seconds < SOON
        assert run.process.wait(LIMIT) != 0
    (record,) = run.dumps()
    f = record.finding
    assert (f.check, f.kind) == ("flight-recorder", "hang")
    assert "the scheduler hangs" in f.headline
    assert "SIGTERM" in f.got
    assert "g4debug/faults/delayed_step.py" in f.got
    # With the overlap scheduling that FROZEN_KV_MTP has from 0.5.14 on, or without it.
    loop = "event_loop_normal" if releases.has_v1_worker() else "event_loop_overlap"
    assert any(loop in place for place in f.history)
    assert len(record.steps) in (2, 3)
    assert record.faults
    assert "exit code -15" in run.text  # of SIGTERM, as without us


def test_sigterm_within_the_first_step_is_no_finding(tmp_path):
    """Kernels are compiled there, for as long as that takes."""
    with engine(tmp_path, G4DEBUG_FAULTS="delayed-step=1*on(600000)") as run:
        run.wait_for("delayed-step #1")
        time.sleep(HANG + 3)
        run.terminate_scheduler()
        assert run.process.wait(LIMIT) != 0
    (record,) = run.dumps()
    assert (record.finding.check, record.finding.kind) == ("flight-recorder", "busy")
    assert "has not returned for" in record.finding.headline
    assert "it was within its first step" in record.finding.headline
    assert "the scheduler hangs" not in run.text


def test_a_step_that_does_not_come_back_is_told_by_itself(tmp_path):
    """After G4DEBUG_HANG_SECONDS, once the pace of the server is known; its watchdog has 300 s."""
    faults = {"G4DEBUG_FAULTS": "delayed-step=8*off->1*on(600000)", "G4DEBUG_HANG_SECONDS": "6"}
    with engine(tmp_path, **faults) as run:
        run.wait_for("the scheduler hangs")
        (record,) = run.dumps()
        assert run.process.poll() is None  # it stops nothing
        run.terminate_scheduler()
        assert run.process.wait(LIMIT) != 0
    assert record.finding.kind == "hang"
    assert "it has waited for the device in this place for" in record.finding.got
    assert len(run.dumps()) == 1


@pytest.mark.long("an engine for each moment")
def test_a_compiler_that_runs_in_the_middle_is_no_hang(tmp_path):
    """The same step, but for the compiler that the scheduler has started."""
    compiles = "delayed-step=8*off->1*compiles(15000)"
    faults = {"G4DEBUG_FAULTS": compiles, "G4DEBUG_HANG_SECONDS": "6"}
    run = ended(tmp_path, **faults)
    assert "delayed-step #1" in run.text
    assert "RESULT" in run.text
    assert run.process.returncode == 0
    assert run.dumps() == []


@pytest.mark.long("an engine for each moment")
def test_sigterm_in_the_instant_in_which_a_suspended_process_goes_on(tmp_path):
    """docker pause, then docker stop."""
    faults = {"G4DEBUG_FAULTS": "delayed-step=50*on(400)", "G4DEBUG_HANG_SECONDS": "6"}
    with engine(tmp_path, **faults) as run:
        run.wait_for("delayed-step #3")
        scheduler = run.scheduler()
        scheduler.suspend()
        time.sleep(12)
        scheduler.terminate()
        scheduler.resume()
        assert run.process.wait(LIMIT) != 0
    assert run.dumps() == []
    assert "no hang is known" not in run.text


def test_sigterm_to_a_healthy_scheduler_kills_at_once_and_leaves_nothing(tmp_path):
    """Steps that are slow, but not hung, are no reason either."""
    with engine(tmp_path, G4DEBUG_FAULTS="delayed-step=50*on(400)") as run:
        run.wait_for("delayed-step #3")
        seconds = run.terminate_scheduler()
        assert run.process.wait(LIMIT) != 0
    assert seconds < SOON
    assert run.dumps() == []
    assert "exit code -15" in run.text


def test_a_run_without_a_fault_leaves_nothing(runs):
    run = runs["healthy"]
    assert run.process.returncode == 0, run.text[-3000:]
    assert "RESULT" in run.text
    assert run.dumps() == []
    assert "g4debug: flight-recorder" not in run.text
