"""A fault on each attention backend that has an adapter, in a real engine: it is caught."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import releases
from real_engine import ENGINE, drive

pytestmark = ENGINE
DRIVER = Path(__file__).parents[1] / "cpu" / "drive_toy.py"
LONG = pytest.mark.long("an engine for each backend and fault")
# model, attention backend, fault -> the tracer and the kinds of its finding
CASES = {
    ("llama", "torch_native", "row-foreign-page=1*on"): ("page-table", {"foreign-page"}),
    ("llama", "torch_native", "write-foreign=1*on@mode=decode"): ("kv-writes", {"other-request"}),
    ("llama", "triton", "token-alias=1*on@mode=decode"): ("page-table", {"other-request"}),
    ("llama", "trtllm_mha", "page-alias=1*on@mode=decode"): ("page-table", {"other-request"}),
    ("llama", "fa3", "page-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("gpt-oss", "fa3", "page-alias=1*on@mode=extend"): ("page-table", {"other-request", "stale"}),
    ("llama", "flashinfer", "token-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("llama", "flashinfer", "token-alias=1*on@mode=extend"): ("page-table", {"other-request"}),
    ("gemma-3", "flashinfer", "token-oob=1*on@mode=extend"): ("page-table", {"out-of-range"}),
    ("deepseek", "flashinfer", "token-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("deepseek", "fa3", "page-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("deepseek", "flashmla", "page-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("deepseek", "trtllm_mla", "page-alias=1*on@mode=decode"): ("page-table", {"other-request"}),
    ("deepseek", "triton", "write-foreign=1*on@mode=decode"): ("kv-writes", {"other-request"}),
    ("llama-4", "fa3", "page-oob=5*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("llama-4", "fa3", "write-foreign=1*on@mode=decode"): ("kv-writes", {"other-request"}),
    ("lfm2", "trtllm_mha", "write-foreign=1*on@mode=decode"): ("kv-writes", {"other-request"}),
    ("lfm2", "flashinfer", "write-foreign=1*on@mode=extend"): ("kv-writes", {"other-request"}),
    ("lfm2", "trtllm_mha", "kv-bit-flip=1*on(30)"): ("kv-integrity", {"kv-changed"}),
    ("qwen3-next", "trtllm_mha", "page-oob=1*on@mode=decode"): ("page-table", {"out-of-range"}),
    ("qwen3-next", "flashinfer", "token-oob=1*on@mode=extend"): ("page-table", {"out-of-range"}),
    ("qwen3-next", "trtllm_mha", "write-foreign=1*on@mode=decode"): (
        "kv-writes",
        {"other-request"},
    ),
    ("qwen3-next", "trtllm_mha", "lent-row-page=1*on"): ("prefix-cache", {"lent-row"}),
    ("qwen3-next", "trtllm_mha", "insert-wrong-page=1*on"): ("prefix-cache", {"wrong-page"}),
    ("qwen3-next", "trtllm_mha", "kv-bit-flip=1*on(30)"): ("kv-integrity", {"kv-changed"}),
    ("deepseek", "triton", "kv-bit-flip=1*on(30)"): ("kv-integrity", {"kv-changed"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id="-".join(case), marks=LONG) for case in CASES]
)
def test_it_is_caught(case, tmp_path):
    model, backend, fault = case
    releases.only_where_entered(model, backend)
    tracer, kinds = CASES[case]
    arguments = json.dumps({"attention_backend": backend, "log_level": "info"})
    run = drive(
        tmp_path,
        str(DRIVER),
        model,
        arguments,
        G4DEBUG_TRACE=",".join({"page-table", "kv-writes", "kv-integrity", tracer}),
        G4DEBUG_MODE="raise",
        G4DEBUG_FAULTS=f"seed=4;{fault}",
    )
    assert run.status != 0
    assert f"g4debug fault (seed=4) {fault.partition('=')[0]} #1" in run.log
    finding = run.dumps[0].finding
    assert (finding.check, finding.kind in kinds) == (tracer, True), finding.headline
