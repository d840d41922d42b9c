"""kv-integrity on a real engine: silent where all is well, and each data fault found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g4debug import dump

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
DRIVER = Path(__file__).with_name("drive_kv_engine.py")
FAULTS = "seed=2;kv-nan=1*full;kv-bit-flip=1*swa(3)@step=8;kv-write-freed=1*full"
FIRED = re.compile(r"g4debug fault \(seed=2\) (kv-[a-z-]+) #1: (.*) \[step (\d+): ")


def drive(folder, **environ):
    """(tokens, log, findings) of one run."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-m", "g4debug.cpu", str(DRIVER)],
        env={**clean, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    tokens = json.loads(re.search(r"^RESULT (.*)$", done.stdout, re.M)[1])
    return tokens, done.stdout, [dump.read(p).finding for p in sorted(folder.glob("*.pt"))]


def test_a_sound_server_gives_the_same_tokens_and_no_finding(tmp_path):
    plain, _, _ = drive(tmp_path / "plain")
    armed, log, findings = drive(tmp_path / "armed", G4DEBUG_TRACE="kv-integrity")
    assert "armed: kv-integrity (raise)" in log
    assert "checks nothing" not in log
    assert not findings
    assert armed == plain


def test_every_data_fault_is_found(tmp_path):
    _, log, findings = drive(
        tmp_path, G4DEBUG_TRACE="kv-integrity", G4DEBUG_MODE="log", G4DEBUG_FAULTS=FAULTS
    )
    fired = {name: (what, int(step)) for name, what, step in FIRED.findall(log)}
    assert set(fired) == {"kv-nan", "kv-bit-flip", "kv-write-freed"}

    def found(kind, layer_kind):
        return next(f for f in findings if f.kind == kind and f.location.layer_kind == layer_kind)

    what, step = fired["kv-nan"]
    page, layer = re.search(r"full page (\d+)", what)[1], re.search(r"layer (\d+)", what)[1]
    nan = found("kv-changed", "full")
    assert f"FULL page {page}, " in nan.headline
    assert f"of layer {layer}, " in nan.headline
    assert "NaN or Inf in" in nan.got
    assert nan.location.step <= step + 1

    what, step = fired["kv-bit-flip"]
    page, layer = re.search(r"swa page (\d+)", what)[1], re.search(r"layer (\d+)", what)[1]
    flip = found("kv-changed", "sliding")
    assert f"SWA page {page}, " in flip.headline
    assert f"of layer {layer}, " in flip.headline
    assert flip.location.step <= step + 1

    what, _ = fired["kv-write-freed"]
    page, slot = re.search(r"full page (\d+) slot (\d+)", what).groups()
    freed = found("write-after-free", "full")
    assert f"FULL page {page} was written after it was freed (slot {slot}, " in freed.headline
    assert not re.search(r"tracer kv-integrity failed|page ledger failed", log)
