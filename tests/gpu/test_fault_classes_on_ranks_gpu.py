"""On two GPUs with tensor parallelism, CUDA graphs on: the classes of test_fault_classes.py.

A server in mode ``log`` is struck on both ranks in the same way, one in mode ``contain`` and one in
mode ``raise`` on rank 1 only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from test_rank_divergence_gpu import ENGINE, models, serve

from g4debug.dumps import reading

__all__ = ["models"]  # the fixture
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
TRACERS = (
    "page-table,kv-allocator,spec-lifecycle,pool-leak,prefix-cache,kv-writes,rank-divergence,"
    "flight-recorder"
)
# Fault -> the action, and the tracers of which one must tell it.
BOTH = {
    "row-wrong-page": ("1*own", {"page-table"}),
    "swa-mapping-slot": ("1*other@at=4", {"kv-writes"}),
    "page-alias": ("1*on@mode=replay@at=9", {"page-table"}),
    "lost-free": ("1*on", {"pool-leak"}),
    "insert-wrong-page": ("1*on@at=4", {"prefix-cache"}),
    "verify-input": ("1*draft@at=2", {"spec-lifecycle"}),
    "sampled-token": ("1*on", {"spec-lifecycle"}),
}
CONTAINED = "write-out-of-range"


class Run(NamedTuple):
    status: int
    log: str
    findings: list[Any]


def struck(folder: Path, mode: str, plan: list[str]) -> Run:
    status, log, dumps = serve(
        folder,
        ENGINE,
        400,
        G4DEBUG_TRACE=TRACERS,
        G4DEBUG_LEAK_STEPS="4",
        G4DEBUG_MAX_DUMPS="60",
        G4DEBUG_MODE=mode,
        G4DEBUG_FAULTS=";".join(["seed=1", *plan]),
    )
    return Run(status, log, [reading.read(path).finding for path in dumps])


def ranks_struck(run: Run, fault: str) -> int:
    return len(re.findall(rf" {fault} #1: ", run.log))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, models: None) -> Run:
    plan = [f"{fault}={action}" for fault, (action, _) in BOTH.items()]
    return struck(tmp_path_factory.mktemp("both"), "log", plan)


@pytest.mark.parametrize("fault", BOTH)
def test_both_ranks_tell_what_struck_both(both: Run, fault: str) -> None:
    _, tracers = BOTH[fault]
    assert ranks_struck(both, fault) == 2, both.log[-3000:]
    told = [f for f in both.findings if f.check in tracers]
    assert {f.location.rank for f in told} == {0, 1}, [f.headline for f in both.findings]


def test_one_rank_contains_what_struck_it_alone(tmp_path: Path, models: None) -> None:
    run = struck(tmp_path, "contain", [f"{CONTAINED}=3*on@mode=target_verify@rank=1"])
    assert run.status == 0, run.log[-3000:]
    assert ranks_struck(run, CONTAINED) == 1
    told = [f for f in run.findings if f.check == "kv-writes"]
    assert told
    assert {f.location.rank for f in told} == {1}
    assert {f.kind for f in told} <= {"out-of-range", "negative"}
    assert "an illegal memory access" not in run.log


def test_a_table_of_one_rank_stops_both(tmp_path: Path, models: None) -> None:
    run = struck(tmp_path, "raise", ["page-alias=1*on@mode=replay@rank=1"])
    assert run.status != 0
    assert ranks_struck(run, "page-alias") == 1, run.log[-3000:]
    assert [f.check for f in run.findings if f.location.rank == 1][:1] == ["page-table"]
    assert "an illegal memory access" not in run.log
