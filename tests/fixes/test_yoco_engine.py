"""yoco-fast-prefill on a real engine: on with every tracer armed, and off. The same answers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from g4debug import cpu, targets

DRIVER = Path(__file__).with_name("drive_yoco.py")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.skipif(
        targets.sglang_version() is not None and not targets.matches("<0.5.13"),
        reason="written for 0.5.12",
    ),
]


def drive(log: Path, arguments: list[str], **environ: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), *arguments],
            env=cpu.environment(clean | environ),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log.read_text(errors="replace")
    assert process.returncode == 0, text[-3000:]
    return text


def rounds(text: str) -> list[dict]:
    lines = text.splitlines()
    return [json.loads(x.removeprefix("RESULT ")) for x in lines if x.startswith("RESULT ")]


@pytest.mark.parametrize("arguments", [["mtp"], ["overlap"]], ids=["mtp", "overlap, no MTP"])
def test_the_same_answers_and_no_tracer_fires(tmp_path, arguments):
    off = drive(tmp_path / "off.log", arguments, SGLANG_GEMMA4_YOCO="0")
    on = drive(
        tmp_path / "on.log",
        arguments,
        SGLANG_GEMMA4_YOCO="1",
        SGLANG_TRTLLM_MHA_DEBUG="1",
        SGLANG_TRTLLM_MHA_DEBUG_DIR=str(tmp_path / "dumps"),
    )
    assert "yoco-fast-prefill: on: layers 6 to 7 of 8" in on
    assert "yoco-fast-prefill: on" not in off
    assert not list(tmp_path.glob("dumps/*"))
    got, wanted = rounds(on), rounds(off)
    assert len(got) == len(wanted) == 4
    for a, b in zip(got, wanted, strict=True):
        assert a["tokens"] == b["tokens"], a["round"]
        assert a["cached"] == b["cached"]
        for mine, theirs in zip(a["logprobs"], b["logprobs"], strict=True):
            assert mine[1:] == pytest.approx(theirs[1:], abs=1e-4)
    assert max(got[2]["cached"]) == 192
    assert [len(x) for x in got[3]["logprobs"]] == [50, 0, 64]
