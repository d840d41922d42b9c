"""The layer paths of this release in a real engine: the same tokens, and no tracer fires.

TINY has a per-layer embedding (E2B, E4B), TINY_MOE experts (26B-A4B). float32; the kernels are
run by Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

from g4debug import discovery
from g4debug.hooking import targets

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_paths.py")
PATHS = {"tiny": ("ple-tail",), "moe": ("fused-router", "triple-rmsnorm")}
# Logarithms of probabilities, float32, after 8 layers whose sums are in another order.
BOUND = 1e-4


@pytest.mark.parametrize("name", PATHS)
def test_the_same_tokens_on_and_off_with_the_tracers_armed(tmp_path, name):
    paths = [p for p in PATHS[name] if targets.matches(discovery.load("fix", p).needs)]
    if not paths:
        pytest.skip(f"this SGLang is none that {' or '.join(PATHS[name])} is written for")
    if name == "moe" and targets.matches(">=0.5.13"):
        # On CUDA it does not, and neither do the paths; test_layer_paths.py compares the layers.
        pytest.skip("on a CPU, the router of this SGLang leaves out its own scale")
    switches = [f"G4DEBUG_FIX_{p.upper().replace('-', '_')}" for p in paths]

    def run(folder, value, **environ):
        command = (str(DRIVER), name, str(folder))  # models of its own
        return drive(folder, *command, **dict.fromkeys(switches, value), **environ)

    runs = side_by_side(
        off=lambda: run(tmp_path / "off", "0"),
        on=lambda: run(tmp_path / "on", "1", SGLANG_TRTLLM_MHA_DEBUG="1"),
    )
    assert not any(f"{p}: active" in runs["off"].log for p in paths)
    log = runs["on"].log
    assert all(f"{p}: active (first: layer 0)" in log for p in paths), log
    on, off = runs["on"].result, runs["off"].result
    assert [o["tokens"] for o in on] == [o["tokens"] for o in off]
    assert len({t for o in on for t in o["tokens"]}) > 10  # the model says something
    for ours, own in zip(on, off, strict=True):
        assert (
            max(abs(a - b) for a, b in zip(ours["logprobs"], own["logprobs"], strict=True)) < BOUND
        )
    assert not runs["on"].dumps
