"""repro/idle_admission.py as a user runs it: it stands, g4debug says why, the fix serves."""

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
SCRIPT = ("idle_admission.py", "--json")


@pytest.mark.long("a whole script with four engines, two of which stand for 40 s")
def test_all_variants_do_what_they_should(script):
    done = script()
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["arms"]
    assert list(found) == ["clean", "broken", "diagnosed", "fixed"]
    assert found["broken"]["unserved"] == found["diagnosed"]["unserved"] == 1
    assert found["fixed"]["unserved"] == found["clean"]["unserved"] == 0
