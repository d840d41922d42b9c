"""On a GPU, CUDA graphs on: a fault of each class is caught while decode runs in graph replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_replay import run_engine

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Class -> fault, and the tracers of which one must find it first.
CASES = {
    "page table": ("page-alias=1*on@mode=replay", ("page-table",)),
    "allocator": ("double-free=1*on", ("kv-allocator",)),
    # The next table that is built from the mapping is wrong: whoever looks first has it.
    "mapping": ("swa-mapping-corrupt=1*on@mode=decode", ("kv-allocator", "page-table")),
    "mapping exchanged": ("swa-mapping-exchange=1*own", ("page-table",)),
    "mapping slot": ("swa-mapping-slot=1*other", ("kv-writes",)),
    "row": ("row-wrong-page=1*own", ("page-table",)),
    "row swapped": ("row-wrong-page=1*order", ("page-table",)),
    "batch rows": ("batch-rows=1*on", ("page-table",)),
    "published length": ("future-length=1*plus", ("spec-lifecycle",)),
    "speculation": ("seq-len-off-by-one=1*plus", ("spec-lifecycle",)),
    "leak": ("lost-free=1*on", ("pool-leak",)),
    "data": ("kv-bit-flip=1*on", ("kv-integrity",)),
    "write out of range": ("write-out-of-range=1*on@mode=target_verify", ("kv-writes",)),
    "write twice": ("write-twice=1*on@mode=target_verify", ("kv-writes",)),
    "write over another's": ("write-foreign=1*on@mode=target_verify", ("kv-writes",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_each_class_is_caught(name: str, tmp_path: Path) -> None:
    fault, tracers = CASES[name]
    switches = {"G4DEBUG_LEAK_STEPS": "1"}
    if tracers[0] in ("kv-integrity", "kv-writes"):  # opt-in
        switches["G4DEBUG_TRACE"] = tracers[0]
        switches["G4DEBUG_NOT_RUN_ON_THIS_RELEASE"] = "1"
    status, log, dumps = run_engine(tmp_path, G4DEBUG_FAULTS=f"seed=3;{fault}", **switches)
    assert f"g4debug fault (seed=3) {fault.partition('=')[0]} #1" in log, log[-3000:]
    found = [reading.read(path).finding for path in dumps]
    assert [f.check for f in found][:1] in [[t] for t in tracers], log[-3000:]
    assert "an illegal memory access" not in log
    assert status != 0
    if name == "page table" or tracers == ("kv-writes",):
        assert found[0].location.replay


def test_in_contain_mode_no_write_leaves_its_pool(tmp_path: Path) -> None:
    """The context lives, and the answers are given."""
    fault = "write-out-of-range=5*on@mode=target_verify"
    status, log, dumps = run_engine(
        tmp_path,
        G4DEBUG_FAULTS=f"seed=3;{fault}",
        G4DEBUG_TRACE="kv-writes",
        G4DEBUG_MODE="contain",
        G4DEBUG_NOT_RUN_ON_THIS_RELEASE="1",
    )
    assert status == 0, log[-3000:]
    assert log.count("g4debug fault (seed=3) write-out-of-range #") == 5
    assert {reading.read(path).finding.kind for path in dumps} <= {"out-of-range", "negative"}
    assert dumps


def test_sound_writes_are_left_alone(tmp_path: Path) -> None:
    """Eager prefills, and verifies in CUDA graphs with padding rows."""
    status, log, dumps = run_engine(
        tmp_path, G4DEBUG_TRACE="kv-writes,page-table", G4DEBUG_NOT_RUN_ON_THIS_RELEASE="1"
    )
    assert status == 0, log[-3000:]
    assert dumps == []
    assert "g4debug: kv-writes" not in log


def test_stress_is_no_finding(tmp_path: Path) -> None:
    faults = "seed=3;abort-request=2*on;forced-retract=2*on;delayed-step=3*on(5)"
    status, log, dumps = run_engine(tmp_path, G4DEBUG_FAULTS=faults)
    assert status == 0, log[-3000:]
    assert dumps == []
    for fault in ("abort-request", "forced-retract", "delayed-step"):
        assert f"{fault} #1" in log
