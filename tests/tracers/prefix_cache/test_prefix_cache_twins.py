"""Two requests with one prompt that come back from a retraction at once: nothing is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g4debug.hooking import targets

DRIVE, ROOT = Path(__file__).with_name("drive_twins.py"), Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


@pytest.mark.parametrize(
    "core", [pytest.param("python", marks=pytest.mark.long("the older core")), "rust"]
)
def test_the_end_of_a_prompt_becomes_the_end_of_a_node(core):
    """SGLang hands a prompt over again, after it has freed the pages that the cache had of it."""
    if targets.path("tree.prefix") is None:
        pytest.skip("this SGLang hands a prompt over once")
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("G4DEBUG_", "SGLANG_"))}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(DRIVE), core],
        env=environ, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    found = json.loads(line.removeprefix("RESULT "))
    assert found["served"] == 2
    assert found["chunks"]
    assert 16 in found["inserts"]
    assert found["judged"]
    assert (found["broken"], found["doubts"]) == ("", 0)
