"""The three layer paths in a real engine: the same tokens, and no tracer fires.

TINY has a per-layer embedding (E2B, E4B), TINY_MOE experts (26B-A4B). float32; the kernels are
run by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVER = Path(__file__).with_name("drive_paths.py")
PATHS = {"tiny": ("ple-tail",), "moe": ("fused-router", "triple-rmsnorm")}
# Logarithms of probabilities, float32, after 8 layers whose sums are in another order.
BOUND = 1e-4


def drive(folder, name, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "g4debug.cpu", str(DRIVER), name, str(folder)],
        env=clean | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = re.search(r"^RESULT (.*)$", done.stdout, re.M)
    assert found, done.stdout + done.stderr
    return json.loads(found[1]), done.stdout + done.stderr


@pytest.mark.parametrize("name", PATHS)
def test_the_same_tokens_on_and_off_with_the_tracers_armed(tmp_path, name):
    switches = [f"G4DEBUG_FIX_{p.upper().replace('-', '_')}" for p in PATHS[name]]
    off, log = drive(tmp_path, name, **dict.fromkeys(switches, "0"))
    assert not any(f"{p}: active" in log for p in PATHS[name])
    dumps = tmp_path / "dumps"
    armed = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps)}
    on, log = drive(tmp_path, name, **dict.fromkeys(switches, "1"), **armed)
    assert all(f"{p}: active (first: layer 0)" in log for p in PATHS[name]), log
    assert [o["tokens"] for o in on] == [o["tokens"] for o in off]
    assert len({t for o in on for t in o["tokens"]}) > 10  # the model says something
    for ours, own in zip(on, off, strict=True):
        assert (
            max(abs(a - b) for a, b in zip(ours["logprobs"], own["logprobs"], strict=True)) < BOUND
        )
    assert not list(dumps.glob("*.pt"))
