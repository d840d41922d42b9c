"""On a GPU, CUDA graphs on: Llama, Qwen3 and gpt-oss in their real shapes, and EAGLE."""

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
SHAPES = "workloads.shapes"
TABLE, WRITE = "page-alias=1*on@mode=replay", "write-twice=1*on@mode=decode"
# Name -> workload, fault, and the tracers of which one must find it first.
CASES = {
    "fa3: page table": ("LLAMA", TABLE, ("page-table",)),
    "fa3: page out of range": ("LLAMA", "page-oob=1*on@mode=replay", ("page-table",)),
    "fa3: allocator": ("LLAMA", "double-free=1*on", ("kv-allocator",)),
    "fa3: leak": ("LLAMA", "lost-free=1*on", ("pool-leak",)),
    "fa3: data": ("LLAMA", "kv-bit-flip=1*on", ("kv-integrity",)),
    "fa3: write twice": ("LLAMA", WRITE, ("kv-writes",)),
    "triton: list of tokens": ("LLAMA_TRITON", "token-oob=1*on@mode=replay", ("page-table",)),
    "triton: write twice": ("LLAMA_TRITON", WRITE, ("kv-writes",)),
    "flashinfer: list": ("LLAMA_FLASHINFER", "token-oob=1*on@mode=replay", ("page-table",)),
    "flashinfer: another's token": (
        "LLAMA_FLASHINFER", "token-alias=1*on@mode=extend", ("page-table",),
    ),
    "Qwen3: page table": ("QWEN3", TABLE, ("page-table",)),
    "gpt-oss: page table": ("GPT_OSS", TABLE, ("page-table",)),
    "gpt-oss: mapping": (
        "GPT_OSS", "swa-mapping-corrupt=1*on@mode=decode", ("kv-allocator", "page-table"),
    ),
    "gpt-oss on triton: list": ("GPT_OSS_TRITON", "token-oob=1*on@mode=replay", ("page-table",)),
    "EAGLE on triton: list": ("EAGLE_TRITON", "token-oob=1*on@mode=replay", ("page-table",)),
    "EAGLE: lengths": ("EAGLE", "seq-len-off-by-one=1*plus", ("spec-lifecycle",)),
    "EAGLE: another's page": ("EAGLE", "row-foreign-page=1*on", ("page-table",)),
    "EAGLE on triton: another's page": (
        "EAGLE_TRITON", "row-foreign-page=1*on", ("page-table",),
    ),
    # All requests end in one step: what strikes a free then is seen when nobody asks any more.
    "EAGLE: allocator": ("EAGLE", "alloc-double=1*on", ("kv-allocator",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_fault_of_each_class_is_caught(name: str, tmp_path: Path) -> None:
    workload, fault, tracers = CASES[name]
    switches = {"G4DEBUG_LEAK_STEPS": "1", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}
    if tracers[0] in ("kv-integrity", "kv-writes"):  # opt-in
        switches["G4DEBUG_TRACE"] = tracers[0]
    status, log, dumps = run_engine(
        tmp_path, f"{SHAPES}:{workload}", G4DEBUG_FAULTS=f"seed=3;{fault}", **switches
    )
    assert f"g4debug fault (seed=3) {fault.partition('=')[0]} #1" in log, log[-3000:]
    found = [reading.read(path).finding for path in dumps]
    assert [f.check for f in found][:1] in [[t] for t in tracers], log[-3000:]
    assert "an illegal memory access" not in log
    assert status != 0
