"""Two tensor-parallel ranks on the CPU engine: real schedulers, SGLang's collectives, on gloo.

The weights come from one checkpoint, of which SGLang's loader gives each rank its shards.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

pytestmark = ENGINE
DRIVER = str(Path(__file__).parent / "drive_tensor_parallel.py")
ARMED = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_LEAK_STEPS": "8"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return WhenAsked(
        one=lambda: drive(folder / "one", DRIVER, "mtp", "1", seconds=300),
        plain=lambda: drive(folder / "plain", DRIVER, "plain", "2", seconds=300, **ARMED),
        mtp=lambda: drive(folder / "mtp", DRIVER, "mtp", "2", seconds=300, **ARMED),
    )


def test_one_rank_is_what_the_others_are_compared_with(runs):
    result = runs["one"].result
    assert len(result["ranks"]) == 1
    assert result["accept_length"] > 1.8


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_two_ranks_give_the_tokens_of_one(runs, kind):
    assert runs[kind].status == 0, runs[kind].log[-3000:]
    result = runs[kind].result
    assert [title[-3:] for title in result["ranks"]] == ["TP0", "TP1"]
    assert result["tokens"] == runs["one"].result["tokens"]


def test_two_ranks_accept_what_one_does(runs):
    assert runs["mtp"].result["accept_length"] == runs["one"].result["accept_length"]


@pytest.mark.parametrize("kind", ["plain", "mtp"])
def test_every_rank_is_armed_and_finds_nothing(runs, kind):
    run = runs[kind]
    armed = re.findall(r"\[scheduler\] armed: (.*?) \(raise\)", run.log)
    assert len(armed) == 2, run.log[-3000:]
    for tracers in armed:
        assert {"page-table", "pool-leak", "spec-lifecycle", "kv-allocator"} <= set(
            tracers.split(", ")
        )
    assert not [dump.finding.headline for dump in run.dumps]
