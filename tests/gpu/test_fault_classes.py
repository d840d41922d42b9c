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
    "allocator": ("double-free=1*on", ("swa-allocator",)),
    # The next table that is built from the mapping is wrong: whoever looks first has it.
    "mapping": ("swa-mapping-corrupt=1*on@mode=decode", ("swa-allocator", "page-table")),
    "speculation": ("seq-len-off-by-one=1*plus", ("spec-lifecycle",)),
    "leak": ("lost-free=1*on", ("pool-leak",)),
    "data": ("kv-bit-flip=1*on", ("kv-integrity",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_each_class_is_caught(name: str, tmp_path: Path) -> None:
    fault, tracers = CASES[name]
    switches = {"G4DEBUG_LEAK_STEPS": "1"}
    if "kv-integrity" in tracers:  # opt-in
        switches["G4DEBUG_TRACE"] = "kv-integrity"
    status, log, dumps = run_engine(tmp_path, G4DEBUG_FAULTS=f"seed=3;{fault}", **switches)
    assert f"g4debug fault (seed=3) {fault.partition('=')[0]} #1" in log, log[-3000:]
    found = [reading.read(path).finding for path in dumps]
    assert [f.check for f in found][:1] in [[t] for t in tracers], log[-3000:]
    assert "an illegal memory access" not in log
    assert status != 0
    if name == "page table":
        assert found[0].location.replay


def test_stress_is_no_finding(tmp_path: Path) -> None:
    faults = "seed=3;abort-request=2*on;forced-retract=2*on;delayed-step=3*on(5)"
    status, log, dumps = run_engine(tmp_path, G4DEBUG_FAULTS=faults)
    assert status == 0, log[-3000:]
    assert dumps == []
    for fault in ("abort-request", "forced-retract", "delayed-step"):
        assert f"{fault} #1" in log
