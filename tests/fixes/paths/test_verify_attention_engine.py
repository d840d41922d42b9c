"""A real engine with FROZEN_KV_MTP on triton, every tracer armed, with our kernels for a verify."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

from g4debug.fixes.paths import verify_attention
from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        not targets.matches(verify_attention.FIX.needs), reason="SGLang asks no other kernel"
    ),
]
DRIVER = Path(__file__).with_name("drive_verify.py")


def test_the_tokens_and_the_accept_lengths_are_the_same(tmp_path):
    def run(switch):
        return lambda: drive(
            tmp_path / switch, str(DRIVER), SGLANG_TRTLLM_MHA_DEBUG="1",
            G4DEBUG_FIX_VERIFY_ATTENTION=switch,
        )  # fmt: skip

    runs = side_by_side(off=run("0"), on=run("1"))
    assert [run.status for run in runs.values()] == [0, 0]
    assert runs["on"].result == runs["off"].result
    assert "g4debug: verify-attention: active" in runs["on"].log
    assert "g4debug: verify-attention" not in runs["off"].log
    assert runs["on"].dumps == []
