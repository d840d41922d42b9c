"""On a GPU, CUDA graphs on: a fault that exists only at graph replay is found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPRO = Path(__file__).parents[2] / "repro"


def run_engine(
    folder: Path, workload: str = "workloads.e4b_trtllm_mtp", **switches: str
) -> tuple[int, str, list[Path]]:
    """Exit status and log of a small E4B workload, and the dumps that it left."""
    arguments = {"workload": workload, "requests": 8}
    switches = {"SGLANG_TRTLLM_MHA_DEBUG": "1", **switches}
    # With cold caches kernels are compiled for minutes.
    return run_child(folder, "harness.engine", arguments, 600, **switches)


def run_child(
    folder: Path, module: str, arguments: Mapping[str, Any], timeout: float, **switches: str
) -> tuple[int, str, list[Path]]:
    """The same of any child of ``repro/harness``, with its arguments."""
    child = (str(REPRO / "harness" / "child.py"), module, "cuda")
    finished = subprocess.run(
        [sys.executable, *child, str(folder / "result.json"), json.dumps(arguments)],
        env={**os.environ, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"), **switches},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    (folder / "log").write_text(finished.stdout)
    return finished.returncode, finished.stdout, sorted((folder / "dumps").glob("*.pt"))


def test_raise_mode_stops_with_the_replayed_launch(tmp_path: Path) -> None:
    status, log, dumps = run_engine(tmp_path, G4DEBUG_FAULTS="seed=3;page-oob=1*on@mode=replay")
    assert status != 0
    assert "g4debug fault (seed=3) page-oob #1: draft replay" in log
    assert "an illegal memory access" not in log
    assert len(dumps) == 1
    record = reading.read(dumps[0])
    assert record.finding.location.replay
    assert record.finding.location.runner == "draft"
    assert record.table is not None
    assert int(record.table.bad[0, 2]) >= 10_000_000


def test_contain_mode_keeps_the_context_alive(tmp_path: Path) -> None:
    status, log, dumps = run_engine(
        tmp_path, G4DEBUG_FAULTS="seed=3;page-oob=3*on@mode=replay", G4DEBUG_MODE="contain"
    )
    assert status == 0, log[-3000:]
    assert log.count("g4debug fault (seed=3) page-oob") == 3
    assert len(dumps) >= 1
    assert all(reading.read(path).finding.location.replay for path in dumps)


def test_without_the_guard_the_same_fault_kills_the_context(tmp_path: Path) -> None:
    status, log, dumps = run_engine(
        tmp_path, G4DEBUG_FAULTS="seed=3;page-oob=1*on@mode=replay", SGLANG_TRTLLM_MHA_DEBUG="0"
    )
    assert status != 0
    assert "an illegal memory access was encountered" in log
    assert dumps == []


def test_log_mode_dies_but_still_tells(tmp_path: Path) -> None:
    """The kernel gets the bad page; the finding is read from host memory of a dead context."""
    status, log, dumps = run_engine(
        tmp_path, G4DEBUG_FAULTS="seed=3;page-oob=1*on@mode=replay", G4DEBUG_MODE="log"
    )
    assert status != 0
    assert "an illegal memory access was encountered" in log
    assert "g4debug: page-table" in log
    found = {reading.read(path).finding.check for path in dumps}
    assert found == {"page-table", "flight-recorder"}  # the page, and the crash that came of it
