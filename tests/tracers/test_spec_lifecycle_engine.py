"""spec-lifecycle on a real engine: silent while all is well, first when it is not."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from drive_spec import WAITING

from g4debug import dump
from g4debug.record import TrapRecord

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVER = Path(__file__).with_name("drive_spec.py")
UNFIXED = {"G4DEBUG_FIX_IDLE_DRAFT_INPUT": "0", "G4DEBUG_FIX_SPEC_BATCH_GUARDS": "0"}
# None of these ends the server by itself: one run in log mode shows them all.
QUIET = {
    "accept-length": "1*zero@at=4",
    "seq-len-off-by-one": "1*device@at=12",
    "stale-hidden-state": "1*on@at=6->1*draft",
    "double-bookkeeping": "1*verify-ct@at=9",
}


@dataclass
class Run:
    status: int
    log: str
    dumps: list[TrapRecord]

    @property
    def tokens(self) -> dict[str, list[int]]:
        (line,) = [x for x in self.log.splitlines() if x.startswith("RESULT")]
        return json.loads(line.split(" ", 1)[1])


def drive(folder: Path, kind: str, **environ: str) -> Run:
    folder.mkdir()
    log = folder / "log"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "g4debug.cpu", str(DRIVER), kind],
            env={**clean, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"), **environ},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(200)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    found = sorted((folder / "dumps").glob("*"), key=lambda p: p.stat().st_mtime_ns)
    return Run(status, log.read_text(errors="replace"), [dump.read(p) for p in found])


def test_a_sound_server_is_silent_and_its_tokens_are_the_same(tmp_path):
    plain = drive(tmp_path / "plain", "mixed")
    armed = drive(tmp_path / "armed", "mixed", G4DEBUG_TRACE="spec-lifecycle")
    assert (plain.status, armed.status) == (0, 0), armed.log[-3000:]
    assert armed.dumps == []
    assert "spec-lifecycle in " not in armed.log
    assert "tracer spec-lifecycle failed" not in armed.log
    for text in ("Retract requests", "#cached-token: 192"):  # the workload does what it is for
        assert text in armed.log
    both = plain.tokens.keys() & armed.tokens.keys()  # when an abort strikes is not the same
    assert len(both) >= 20
    assert {k: armed.tokens[k] for k in both} == {k: plain.tokens[k] for k in both}


def test_the_natural_zero_accept_is_found_before_sglangs_attribute_error(tmp_path):
    run = drive(tmp_path / "run", "waiting", G4DEBUG_TRACE="spec-lifecycle", **UNFIXED)
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
    fixed = drive(
        tmp_path / "fixed",
        "waiting",
        G4DEBUG_TRACE="spec-lifecycle",
        G4DEBUG_FIX_IDLE_DRAFT_INPUT="1",
    )
    assert fixed.status == 0
    assert len(fixed.tokens) == WAITING
    assert fixed.dumps == []


def test_faults_that_end_no_server_are_found_in_one_run(tmp_path):
    faults = ";".join(f"{name}={chain}" for name, chain in QUIET.items())
    run = drive(
        tmp_path / "run",
        "mixed",
        G4DEBUG_TRACE="spec-lifecycle",
        G4DEBUG_MODE="log",
        G4DEBUG_FAULTS=f"seed=3;{faults}",
    )
    kinds = {r.finding.kind for r in run.dumps}
    assert kinds >= {"accept-length", "seq-len", "stale-hidden-state", "bookkeeping"}
    for record in run.dumps:
        assert record.finding.reference
        assert not record.transitions[-1].ok
