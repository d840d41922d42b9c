"""spec-lifecycle on a real engine: silent while all is well, first when it is not."""

from __future__ import annotations

from pathlib import Path

import drive_spec
import pytest
from real_engine import ENGINE, drive, side_by_side

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        targets.path("worker.seed_step") is None,
        reason="the v1 worker only: SGLang before 0.5.14",
    ),
]
DRIVER = Path(drive_spec.__file__)
UNFIXED = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0", "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
# None of these ends the server by itself: one run in log mode shows them all.
QUIET = {
    "accept-length": "1*zero@at=4",
    "seq-len-off-by-one": "1*device@at=12",
    "stale-hidden-state": "1*on@at=6->1*draft",
    "double-bookkeeping": "1*verify-ct@at=9",
}


ARMED = {"G4DEBUG_TRACE": "spec-lifecycle"}


def test_a_sound_server_is_silent_and_its_tokens_are_the_same(tmp_path):
    runs = side_by_side(
        plain=lambda: drive(tmp_path / "plain", str(DRIVER), "mixed"),
        armed=lambda: drive(tmp_path / "armed", str(DRIVER), "mixed", **ARMED),
    )
    plain, armed = runs["plain"], runs["armed"]
    assert (plain.status, armed.status) == (0, 0), armed.log[-3000:]
    assert armed.dumps == []
    assert "spec-lifecycle in " not in armed.log
    limits = [x for x in armed.log.splitlines() if "spec-lifecycle is limited" in x]
    assert all("not by its values" in x for x in limits)
    assert len(limits) == 1
    for text in ("Retract requests", "#cached-token: 192"):  # the workload does what it is for
        assert text in armed.log
    # When an abort strikes is not the same.
    both = plain.result.keys() & armed.result.keys()
    assert len(both) >= 20
    assert {k: armed.result[k] for k in both} == {k: plain.result[k] for k in both}


def test_the_natural_zero_accept_is_found_before_sglangs_attribute_error(tmp_path):
    on = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "1"}
    runs = side_by_side(
        unfixed=lambda: drive(tmp_path / "run", str(DRIVER), "waiting", **ARMED, **UNFIXED),
        fixed=lambda: drive(tmp_path / "fixed", str(DRIVER), "waiting", **ARMED, **on),
    )
    run, fixed = runs["unfixed"], runs["fixed"]
    assert run.status != 0
    (record,) = run.dumps
    finding = record.finding
    assert (finding.kind, finding.site) == ("verify-input-left", "batch.merge")
    assert finding.next_command.startswith("G4DEBUG_FIX_IDLE_DRAFT_INPUT=1 ")
    assert "AttributeError: 'FrozenKVMTPVerifyInput'" not in run.log
    left = [t for t in record.transitions if t.note == "every request finished"]
    assert left
    assert f"in the verify of step {left[-1].step};" in finding.cause
    assert not record.transitions[-1].ok
    assert fixed.status == 0
    assert len(fixed.result) == drive_spec.WAITING
    assert fixed.dumps == []


def test_faults_that_end_no_server_are_found_in_one_run(tmp_path):
    faults = ";".join(f"{name}={chain}" for name, chain in QUIET.items())
    run = drive(
        tmp_path / "run",
        str(DRIVER),
        "mixed",
        **ARMED,
        G4DEBUG_MODE="log",
        G4DEBUG_FAULTS=f"seed=3;{faults}",
    )
    kinds = {r.finding.kind for r in run.dumps}
    assert kinds >= {"accept-length", "seq-len", "stale-hidden-state", "bookkeeping"}
    for record in run.dumps:
        assert record.finding.reference
        assert not record.transitions[-1].ok
