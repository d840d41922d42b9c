"""mm-batched-encoder with tensor parallelism: two real processes with real all-reduces, on gloo.

The ranks wait for each other in every layer of the tower. So all of them must cut the images into
the same passes, whatever happens to one of them alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from real_engine import ENGINE, started

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    *ENGINE,
    pytest.mark.written_for("mm-batched-encoder"),
]
DRIVER = Path(__file__).with_name("drive_tp_mm.py")
PLENTY, ONE = 65_536, 100  # KB: a pass takes 89 for each image
SECONDS = 120  # on a busy machine; the passes take milliseconds


def run(folder, budgets, fails=(0, 0), **environ):
    """(exit status or None for one that was still running, result, log) of each rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    here, support = DRIVER.parent, DRIVER.parents[2] / "support"
    path = os.pathsep.join([str(here), str(support), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "G4DEBUG_FIX_MM_BATCHED_ENCODER": "1", **environ}
    found = []
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    folder / f"{port}-{rank}",
                    *map(str, (DRIVER, rank, port, budgets[rank], fails[rank])),
                    **environ,
                )
            )
            for rank in range(2)
        ]
        for process, log in ranks:
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            text = log.read_text(errors="replace")
            lines = [x.removeprefix("RESULT ") for x in text.splitlines() if x.startswith("RESULT")]
            found.append((status, json.loads(lines[0]) if lines else None, text))
    return found


@pytest.mark.long("an engine of two ranks")
def test_ranks_with_unlike_devices_agree_on_the_passes(tmp_path):
    """Alone, one of them would take 5 images in a pass, and the other 1."""
    first, second = run(tmp_path, budgets=(PLENTY, ONE))
    assert first[0] == second[0] == 0, first[2][-2000:] + second[2][-2000:]
    assert first[1]["together"] == second[1]["together"] == [1] * 5
    for _, result, _ in (first, second):
        assert result["alone"] == [1] * 5
        assert result["difference"] < 1e-5 < 0.1 < result["size"]
    first, second = run(tmp_path, budgets=(PLENTY, PLENTY))
    assert first[1]["together"] == second[1]["together"] == [5], first[2][-2000:]
    assert second[1]["difference"] < 1e-5


@pytest.mark.long("an engine of two ranks")
def test_a_rank_that_runs_out_of_memory_does_not_hang_the_others(tmp_path):
    first, second = run(tmp_path, budgets=(PLENTY, PLENTY), fails=(0, 1))
    assert second[0] == 1, second[2][-2000:]
    errors = [line for line in second[2].splitlines() if "Error: " in line]
    last = errors[-1].removeprefix("[rank1]: ")  # Triton's bindings have words after it
    assert last.startswith("torch.OutOfMemoryError: g4debug: mm-batched-encoder: rank 1 of 2 ")
    for part in ("G4DEBUG_MM_ENCODER_PERCENT", "G4DEBUG_FIX_MM_BATCHED_ENCODER=0"):
        assert part in last
    assert first[0] not in (None, 0)  # its all-reduce fails, because its peer has gone
    assert first[1] is None  # and no embedding of a torn pass got out
