"""On two GPUs, CUDA graphs on: a rank that decides for itself is found, and both ranks say so."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_replay import run_child

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REPRO = Path(__file__).resolve().parents[2] / "repro"
ENGINE = {
    "tp_size": 2,
    "max_running_requests": 8,
    "max_total_tokens": 10240,
    "cuda_graph_bs": [1, 4, 8],
}


def plain() -> dict[str, Any]:
    """Without MTP, as repro/ranks.py serves it."""
    sys.path.insert(0, str(REPRO))
    try:
        from harness.workload import without_mtp
    finally:
        sys.path.remove(str(REPRO))
    return without_mtp()


@pytest.fixture(scope="module")
def models() -> None:
    """The weights, in a process that ends before an engine starts."""
    write = "from workloads import draft_embedding_shard as it; it.write_models()"
    subprocess.run([sys.executable, "-c", write], cwd=REPRO, check=True)


def serve(
    folder: Path, engine: Mapping[str, Any], timeout: float, **switches: str
) -> tuple[int, str, list[Path]]:
    """Exit status and log of 60 requests on these ranks, and the dumps that they left."""
    shape = {"longest": 600, "output": [8, 60]}
    arguments = {"count": 60, "waves": 1, "overrides": engine, "shape": shape, "tape": False}
    switches = {"G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1", **switches}
    return run_child(folder, "harness.mixed", arguments, timeout, **switches)


@pytest.mark.parametrize(
    ("how", "words"), [("on", "in another order"), ("abort", "aborted on one rank")]
)
def test_a_rank_that_decides_for_itself_is_found(
    tmp_path: Path, models: None, how: str, words: str
) -> None:
    engine = {**ENGINE, **(plain() if how == "abort" else {})}
    status, log, dumps = serve(
        tmp_path,
        engine,
        300,
        G4DEBUG_TRACE="rank-divergence,flight-recorder",
        G4DEBUG_FAULTS=f"seed=1;rank-divergence=1*{how}",
    )
    fired = re.search(r"rank-divergence #1: .*\[step (\d+): ", log)
    assert fired, log[-3000:]
    assert status != 0
    records = [reading.read(path) for path in dumps]
    found = [r.finding for r in records if r.finding.kind == "ranks-differ"]
    assert found, log[-3000:]
    # Requests are taken between two steps.
    assert 0 <= found[0].location.step - int(fired[1]) <= (how == "on")
    assert words in found[0].cause
    assert {r.finding.location.rank for r in records} == {0, 1}
