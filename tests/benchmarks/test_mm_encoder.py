"""mm_encoder.py measures a whole prefill on every release: the same token in its three ways.

And what it measures is what an engine computes: the same logits for the same prompt.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import pytest
from real_engine import ENGINE, drive

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measuring import servers

BENCHMARKS = servers.BENCHMARKS
DRIVER = Path(__file__).with_name("drive_mm_encoder.py")
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
pytestmark = [
    pytest.mark.long("Schedulers with pictures, kernels interpreted"),
    *ENGINE,
    pytest.mark.written_for("vision-layer"),
]


def test_the_whole_prefill_is_measured_in_three_ways(tmp_path):
    out = tmp_path / "out.csv"
    script = str(BENCHMARKS / "mm_encoder.py")
    run = drive(
        tmp_path, script, "--device", "cpu", "--tower", "tiny", "--rounds", "1", "--out", str(out),
        cold=True, **INTERPRETED,
    )  # fmt: skip
    assert run.status == 0, run.log[-3000:]
    with out.open() as lines:
        rows = list(csv.DictReader(x for x in lines if not x.startswith("#")))
    assert sorted(row["way"] for row in rows) == ["alone", "fused", "together"]
    assert [row["same_token"] for row in rows] == ["True"] * 3
    assert all(float(row["end_to_end_s"]) > 0 for row in rows)
    # Otherwise another token would be no news.
    assert all(float(row["logits_apart"]) < float(row["margin"]) / 2 for row in rows)
    assert "fused over alone, end to end" in run.log
    assert not run.dumps


def test_its_logits_are_an_engines(tmp_path):
    plugin = [str(servers.distribution("seeded_weights", tmp_path)), str(BENCHMARKS)]
    path = os.pathsep.join([*plugin, os.environ.get("PYTHONPATH", "")])
    off = {"G4DEBUG_FIX_MM_BATCHED_ENCODER": "0", "G4DEBUG_FIX_VISION_LAYER": "0"}
    mine, theirs = (
        drive(tmp_path / where, str(DRIVER), where, str(tmp_path / where), cold=True, **environ)
        for where, environ in (
            ("in_process", INTERPRETED),
            ("engine", {**off, "PYTHONPATH": path}),
        )
    )
    assert (mine.status, theirs.status) == (0, 0), mine.log[-3000:] + theirs.log[-3000:]
    assert mine.result["token"] == theirs.result["token"] == mine.result["best"][0]
    assert mine.result["best"] == theirs.result["best"]
    assert mine.result["logprobs"] == pytest.approx(theirs.result["logprobs"], abs=1e-5)
    # They vary, so that a wrong picture or place would be seen.
    assert mine.result["logprobs"][0] - mine.result["logprobs"][-1] > 0.01
