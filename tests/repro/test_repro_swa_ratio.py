"""repro/swa_ratio.py as a user runs it: two variants of it, which is what the fix changes."""

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
SCRIPT = ("swa_ratio.py", "--variant", "broken", "--variant", "fixed", "--json")


@pytest.mark.long("a whole script with four engines")
def test_half_of_the_requests_wait_without_the_fix_and_none_with_it(script):
    done = script()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["arms"]
    assert set(found) == {"clean", "broken", "fixed"}
    assert "4 of 8 requests run at the same time." in found["broken"]["what"]
    assert "8 of 8 requests run at the same time." in found["fixed"]["what"]
