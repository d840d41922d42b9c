"""repro/force_eagle.py as a user runs it: promoted, stopped at start, served by EAGLE."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
SCRIPT = ("force_eagle.py", "--json")


def test_promoted_refused_and_served(script):
    done = script()
    assert done.returncode == 0, done.stderr[-4000:]
    arms = json.loads(done.stdout)["arms"]
    assert list(arms) == ["clean", "promoted", "forced", "uneven", "served"]
    assert arms["promoted"]["what"].startswith("served as FROZEN_KV_MTP: completes; all 3 outputs")
    assert arms["served"]["what"].startswith("served as EAGLE: completes; all 3 outputs equal")
    for name in ("forced", "uneven"):
        assert arms[name]["status"] not in (0, None)
        assert arms[name]["seconds"] < arms["clean"]["seconds"]  # no engine was started
    assert "its hidden size is 32, the target's 64" in arms["forced"]["what"]
    assert "head dimensions 32 and 64" in arms["uneven"]["what"]
