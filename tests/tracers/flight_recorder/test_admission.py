"""Which check refuses a request: what we say, and what SGLang's own PrefillAdder does."""

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

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVE = Path(__file__).with_name("drive_admissions.py")
EXAMPLES = 40


def drive(*given: str) -> dict[str, int]:
    """What came up, and how often."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("G4DEBUG_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, str(DRIVE), str(EXAMPLES), *given],
        env=environ, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_each_refusal_is_foretold_and_each_stand_still_is_a_deadlock():
    told = drive()
    for what in (
        "CHUNK swa",
        "CHUNK taken",
        "QUEUE swa",
        "QUEUE full",
        "QUEUE taken",
        "nodes locked: full",
        "nodes locked: swa",
    ):
        assert told[what] > 50, told
    # Earlier releases do not count the page that makes a server with one pool stand.
    one_pool = ["stands: single pool"] if targets.matches(">=0.5.21") else []
    for what in (
        "QUEUE rows", "stands: CHUNK", *one_pool, "as sglang #36458", "by its own prefix",
        "parked-chunk helps", "behind the window is only what it has locked",
    ):  # fmt: skip
        assert told[what] > 0, told


def test_with_the_fix_no_server_with_one_pool_stands():
    told = drive("0", "fixed")
    assert told["served"] == EXAMPLES, told
    assert told["admitted by the fix"] > 0, told
