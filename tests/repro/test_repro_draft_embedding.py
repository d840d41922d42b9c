"""repro/draft_embedding_shard.py as a user runs it.

Of its variants, *fixed* is what tests/cpu/test_tensor_parallel_engine.py runs, and what *broken*
dies of is in tests/fixes/test_draft_embedding_shard.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from g4debug.dumps import reading
from g4debug.hooking import targets

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.skipif(not targets.matches("<0.5.23"), reason="the script needs SGLang to 0.5.21"),
]
REPRO = Path(__file__).parents[2] / "repro"
SCRIPT = ("draft_embedding_shard.py", "--variant", "silent", "--variant", "diagnosed", "--json")


def test_an_answer_is_wrong_and_the_cause_is_named_at_start(script):
    done = script()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["arms"]
    assert set(found) == {"clean", "silent", "diagnosed"}
    assert "the answer is wrong from its token" in found["silent"]["what"]
    record = reading.read(Path(found["diagnosed"]["dump"]))
    assert record.finding.kind == "draft-embedding"
    assert record.finding.location.step == 0
    assert not record.steps


def test_one_gpu_is_too_few(monkeypatch):
    monkeypatch.syspath_prepend(str(REPRO))
    workload = importlib.import_module("workloads.draft_embedding_shard")
    for count, says in ((0, False), (1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert bool(workload.too_few_gpus()) is says
