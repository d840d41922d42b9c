"""On a GPU, CUDA graphs on: bad lists of tokens are found where the triton backend reads them.

``split`` is what a server on sm90 has (prompts and verify on triton, decode on trtllm_mha);
``triton`` has everything there, as Gemma-4 has by default on every chip but sm100.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_replay import run_engine

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKLOADS = {"split": "workloads.e4b_trtllm_mtp", "triton": "workloads.e4b_trtllm_mtp:TRITON"}
# Fault -> the kinds of findings of which it must cause one. Each strikes in a graph's replay.
FAULTS = {
    "token-oob": {"out-of-range"},
    "token-alias": {"other-request", "mapping-mismatch", "mismatch"},
    "token-freed": {"stale"},
    "indptr-off-by-one": {"list-bounds"},
}
AT = "@mode=replay@runner=target"
VERIFY = f"1*on{AT}"
LATER = "{}*off" + AT + "->" + VERIFY  # each at a replay of its own: a launch leaves one record


@pytest.mark.parametrize("workload", WORKLOADS)
def test_contain_survives_a_fault_of_each_kind(workload: str, tmp_path: Path) -> None:
    faults = ";".join(f"{name}={LATER.format(3 * i + 1)}" for i, name in enumerate(FAULTS))
    status, log, dumps = run_engine(
        tmp_path, WORKLOADS[workload], G4DEBUG_FAULTS=f"seed=3;{faults}", G4DEBUG_MODE="contain"
    )
    assert status == 0, log[-3000:]
    for name in FAULTS:
        assert f"g4debug fault (seed=3) {name} #1" in log, log[-3000:]
    found = [reading.read(path).finding for path in dumps]
    kinds = {f.kind for f in found if f.check == "page-table"}
    assert all(kinds & expected for expected in FAULTS.values()), (kinds, log[-3000:])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_raise_stops_the_step_of_a_bad_token(workload: str, tmp_path: Path) -> None:
    fault = f"seed=3;token-oob={VERIFY}"
    status, log, dumps = run_engine(tmp_path, WORKLOADS[workload], G4DEBUG_FAULTS=fault)
    assert "g4debug fault (seed=3) token-oob #1: target" in log, log[-3000:]
    assert "an illegal memory access" not in log
    assert status != 0
    where = reading.read(dumps[0]).finding.location
    assert (where.runner, where.forward_mode) == ("target", "TARGET_VERIFY")
    assert where.replay


def test_a_healthy_server_on_triton_is_left_alone(tmp_path: Path) -> None:
    status, log, dumps = run_engine(tmp_path, WORKLOADS["triton"])
    assert status == 0, log[-3000:]
    assert dumps == []
    assert "prefill on triton, decode on triton" in log
