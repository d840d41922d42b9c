"""On a GPU, prompts on trtllm_mha, too: SGLang 0.5.23 has a kernel for them on sm90 (fmha_v2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_replay import run_engine

from g4debug.dumps import reading
from g4debug.fixes.source import exists, source

HOOK = "sglang.srt.arg_groups.attention_hook"


def on_sm90() -> bool:
    """True if this SGLang has a trtllm_mha prefill for sm90."""
    return exists(HOOK) and "backend for prefill requires Hopper (SM90)" in source(HOOK)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not on_sm90(), reason="this SGLang has no trtllm_mha prefill on sm90"),
]
WORKLOAD = "workloads.e4b_trtllm_mtp:ONE_BACKEND"


def test_a_healthy_server_is_left_alone(tmp_path: Path) -> None:
    status, log, dumps = run_engine(tmp_path, WORKLOAD)
    assert status == 0, log[-3000:]
    assert dumps == []


def test_a_bad_page_of_a_prompt_is_found(tmp_path: Path) -> None:
    fault = "seed=3;page-oob=1*on@mode=extend@runner=target"
    status, log, dumps = run_engine(tmp_path, WORKLOAD, G4DEBUG_FAULTS=fault)
    assert "g4debug fault (seed=3) page-oob #1: target extend" in log, log[-3000:]
    assert "an illegal memory access" not in log
    assert status != 0
    where = reading.read(dumps[0]).finding.location
    assert (where.runner, where.forward_mode, where.replay) == ("target", "EXTEND", False)
