"""repro/triton_decode_window.py as a user runs it, and its verdicts on runs that must not pass."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

REPRO = Path(__file__).parents[2] / "repro"
SCRIPT = ("triton_decode_window.py", "--requests", "16", "--json")


@pytest.mark.long("a whole script with three engines")
@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_the_fix_answers_as_the_model_would(script):
    done = script()
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)["arms"]
    assert list(variants) == ["clean", "broken", "fixed"]
    assert variants["broken"]["behind"] == variants["fixed"]["behind"] > 100
    assert variants["fixed"]["off"] < variants["broken"]["off"]


@pytest.fixture
def repro(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("triton_decode_window")


def token(query, off=0.0, chosen=True, decode=True):
    return {"query": query, "off": off, "chosen": chosen, "decode": decode}


INSIDE, BEHIND = token(50), token(128)
BROKEN = INSIDE, token(128, off=0.5)


@pytest.fixture
def judge(repro, tmp_path, monkeypatch):
    def judged(variant, *tokens, status=0, whole=True, broken=BROKEN):
        monkeypatch.setattr(repro, "WHOLE", whole)

        def run(given, status=0):
            result = {"window": 128, "tokens": list(given)} if status == 0 else {}
            return repro.Outcome(variant, status, 1.0, tmp_path / "log", result)

        return repro.REPRO.variants[variant].judge(run(tokens, status), run(broken))

    return judged


@pytest.mark.parametrize(
    ("variant", "tokens", "good"),
    [
        ("broken", (INSIDE, token(128, off=0.5)), True),
        ("broken", (INSIDE, BEHIND), False),  # nothing is missing there
        ("broken", (token(50, off=0.5), token(128, off=0.5)), False),  # not only behind the window
        ("broken", (INSIDE,), False),
        ("broken", (BEHIND,), False),
        ("fixed", (INSIDE, BEHIND), True),
        ("fixed", (INSIDE, token(128, off=0.5)), False),
        ("fixed", (INSIDE, token(128, chosen=False)), False),
        ("clean", (INSIDE, token(200, off=0.5)), False),
    ],
)
def test_the_verdicts(judge, variant, tokens, good):
    assert judge(variant, *tokens).good is good


def test_before_0_5_14_the_fix_has_to_come_nearer(judge):
    for off, good in ((0.1, True), (0.5, False)):
        verdict = judge("fixed", INSIDE, token(128, off=off), whole=False)
        assert verdict.good is good
    assert judge("clean", INSIDE, token(128, off=0.5), whole=False).good


def test_a_variant_that_died(judge):
    verdict = judge("fixed", status=1)
    assert (verdict.good, verdict.what) == (False, "It did not complete (exit status 1).")
