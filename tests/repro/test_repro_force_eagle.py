"""repro/force_eagle.py as a user runs it: two variants of it, which are what the switch changes.

That NEXTN is promoted without it, and an assistant with two head dimensions refused:
tests/fixes/before_0_5_14/test_force_eagle.py.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.written_for("force-eagle"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
SCRIPT = (
    "force_eagle.py",
    "--variant",
    "forced",
    "--variant",
    "served",
    "--requests",
    "1",
    "--json",
)


def test_refused_at_start_and_served_by_eagle_without_graphs(script):
    done = script()
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)["arms"]
    assert list(variants) == ["clean", "forced", "served"]
    assert variants["forced"]["status"] not in (0, None)
    assert variants["forced"]["seconds"] < variants["clean"]["seconds"]  # no engine was started
    assert "its hidden size is 32, the target's 64" in variants["forced"]["what"]
    assert variants["served"]["what"].startswith(
        "It is served as EAGLE. It completes, and all 1 outputs equal those of clean."
    )
    assert 1 < variants["served"]["accept_length"] < 4
