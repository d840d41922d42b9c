"""zero_accept_merge as a user runs it, with few requests: broken, diagnosed, fixed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g4debug.dumps import reading
from g4debug.hooking import targets

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the repro is run by hand"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.skipif(
        targets.sglang_version() is not None and not targets.matches("<0.5.13"),
        reason="SGLang has the idle input from 0.5.13 on",
    ),
]


SCRIPT = ("zero_accept_merge.py", "--device", "cpu", "--json", "--requests", "9")


def test_all_variants_do_what_they_should(script):
    done = script()
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)["arms"]
    assert list(variants) == ["clean", "broken", "diagnosed", "guarded", "fixed"]
    assert all(it["good"] is True for it in variants.values()), variants
    assert (
        "It dies at hand-over 1: AttributeError in merge_batch (schedule_batch.py)."
        in variants["broken"]["what"]
    )
    assert "object has no attribute 'merge_batch'" in done.stderr  # the user's pain is shown
    for name in ("guarded", "fixed"):
        assert variants[name]["what"].startswith(
            "There are 8 of 8 hand-overs. It completes, and all 9 outputs equal those of clean."
        )
    path = Path(variants["diagnosed"]["dump"])
    record = reading.read(path)
    assert record.finding.check == "spec-lifecycle"
    assert record.finding.headline in done.stderr
    path.unlink()


def test_kv_shared_piecewise_needs_a_gpu_and_says_what_can_be_shown_without():
    done = subprocess.run(
        [sys.executable, str(REPRO / "kv_shared_piecewise.py"), "--device", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs CUDA graphs" in done.stdout
    assert "tests/fixes/before_0_5_14/test_optional_kv.py" in done.stdout
    assert (REPRO.parent / "tests/fixes/before_0_5_14/test_optional_kv.py").is_file()
