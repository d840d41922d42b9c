"""mm-batched-encoder on a real engine: on with every tracer armed, and off. The same answers.

The engine attends causally to images, and its model was trained otherwise. It must say so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_engine import ENGINE, drive, side_by_side

DRIVER = Path(__file__).with_name("drive_mm.py")
SAID = "mm-batched-encoder: on: "
SGLANGS = "Bidirectional attention for image tokens requires TritonAttnBackend."  # once
OURS = "TRTLLMHAAttnBackend attends causally to the tokens of an image"
pytestmark = [
    pytest.mark.long("four engines with images"),
    *ENGINE,
    pytest.mark.written_for("mm-batched-encoder"),
]


def test_the_same_answers_and_no_tracer_fires(tmp_path):
    def run(name, **environ):
        folder = tmp_path / name
        return drive(folder, str(DRIVER), str(folder / "model"), **environ)

    runs = side_by_side(
        off=lambda: run("off", G4DEBUG_FIX_MM_BATCHED_ENCODER="0"),
        on=lambda: run("on", SGLANG_TRTLLM_MHA_DEBUG="1", G4DEBUG_FIXES="all"),
    )
    on, off = runs["on"], runs["off"]
    assert (on.status, off.status) == (0, 0), on.log[-3000:] + off.log[-3000:]
    assert on.log.count(SAID) == 1
    assert f"{SAID}4 images in 2 passes of the vision tower" in on.log
    assert SAID not in off.log
    # SGLang says it with its first image, g4debug at start, and as long as the server runs.
    assert on.log.count(SGLANGS) == off.log.count(SGLANGS) == 1
    assert on.log.index(f"g4debug: {OURS}") < on.log.index(SGLANGS)
    (told,) = (line for line in on.log.splitlines() if line.startswith("WARNED "))
    ((warning,),) = json.loads(told.removeprefix("WARNED "))
    assert warning.startswith(OURS)
    assert not on.dumps
    for a, b in zip(on.results, off.results, strict=True):
        assert a["tokens"] == b["tokens"], a["round"]
        assert a["prompts"] == b["prompts"]
        assert a["verifies"] == b["verifies"]
        for mine, theirs in zip(a["logprobs"], b["logprobs"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
    cut_up, beside, others = on.results
    assert cut_up["prompts"] == [4 * 4 + 4 + 12 + 12 + 4 + 2 * 4 + 3, 6 + 3 * 6 + 6]
    assert beside["prompts"][1::3] == [90, 1]  # text only
    assert beside["prompts"][2] > beside["prompts"][0] > 3 * 50
    # What is seen reaches the answer.
    first, second = others["logprobs"]
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 0.01
