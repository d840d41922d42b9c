"""The swa-allocator tracer on a real engine: silent where all is well, and what it contains."""

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

from g4debug import dump
from g4debug.record import TrapRecord

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVER = Path(__file__).with_name("drive_swa_engine.py")


@dataclass
class Run:
    status: int
    log: str
    outputs: dict[str, list[list[int]]]
    dumps: list[TrapRecord]


def drive(folder: Path, waves: int, **environ: str) -> Run:
    folder.mkdir()
    log = folder / "log"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "g4debug.cpu", str(DRIVER), str(waves), '{"log_level": "info"}'],
            env={**clean, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"), **environ},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    text = log.read_text(errors="replace")
    results = [x for x in text.splitlines() if x.startswith("RESULT")]
    outputs = json.loads(results[0].split(" ", 1)[1]) if results else {}
    found = sorted((folder / "dumps").glob("*"), key=lambda p: p.stat().st_mtime_ns)
    return Run(status, text, outputs, [dump.read(p) for p in found])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return drive(tmp_path_factory.mktemp("plain") / "run", 4)


def test_a_healthy_workload_is_silent_and_its_tokens_are_the_same(plain, tmp_path):
    run = drive(tmp_path / "run", 4, G4DEBUG_TRACE="swa-allocator")
    assert run.status == plain.status == 0, run.log[-3000:]
    assert "KV cache pool is full. Retract requests" in run.log  # it was hard enough
    assert run.dumps == []
    assert "the page ledger failed" not in run.log
    assert run.outputs == plain.outputs
    assert set(run.outputs) == {"first", "again", "last"}


def test_contain_serves_on_as_if_the_frees_had_been_right(plain, tmp_path):
    faults = "seed=4;double-free=5%6*on;free-unallocated=5%3*on"
    run = drive(
        tmp_path / "run", 1, G4DEBUG_TRACE="swa-allocator", G4DEBUG_MODE="contain",
        G4DEBUG_FAULTS=faults,
    )  # fmt: skip
    assert run.status == 0, run.log[-3000:]
    assert run.outputs["first"] == plain.outputs["first"]
    assert "leak detected" not in run.log  # SGLang's own count of its pages
    kinds = {d.finding.kind for d in run.dumps}
    assert kinds == {"double-free", "free-unallocated"}
    for record in run.dumps:
        assert record.events[-1].kind == "free"
        assert record.finding.headline in run.log


def test_an_early_eviction_stops_the_server_and_names_the_request(tmp_path):
    run = drive(
        tmp_path / "run", 1, G4DEBUG_TRACE="swa-allocator", G4DEBUG_FAULTS="early-swa-free=1*on"
    )
    assert run.status != 0
    assert not run.outputs
    (record,) = run.dumps
    finding = record.finding
    assert finding.kind == "evicted-in-window"
    assert finding.location.request in finding.headline
    assert [e.kind for e in record.events][-2:] == ["extend", "evict"]
    assert record.events[-1].caller.endswith("maybe_evict_swa")
    assert "g4debug.trap.TrapError: " + finding.headline in run.log
