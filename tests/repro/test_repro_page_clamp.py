"""repro/page_clamp.py as a user runs it, and its verdicts on runs that must not pass.

Its variant ``broken`` is e4b_trtllm_mtp's, which has run in test_repro.py.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

REPRO = Path(__file__).parents[2] / "repro"
SCRIPT = ("page_clamp.py", "--variant", "clamped", "--variant", "fixed", "--json")
FIRED = "[2026-11-21 10:00:00] g4debug fault (seed=7) stale-swa-state #1: draft backend: …"
UP = "g4debug-repro: engine up"
TOLD = "g4debug: page-table in draft decode: sliding layer 4 gets full-pool page 54, …"
RIGHT = [[1, 2, 3], [4, 5, 6]]


@pytest.mark.long("a whole script with four engines")
@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the repro is run by hand")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_the_clamp_survives_and_guesses_worse_than_the_fix(script):
    done = script()
    assert done.returncode == 0, done.stderr[-4000:]
    variants = json.loads(done.stdout)["arms"]
    assert list(variants) == ["clean", "clamped", "fixed"]
    accepted = {name: it["accept_length"] for name, it in variants.items()}
    assert accepted["fixed"] == pytest.approx(accepted["clean"])
    assert accepted["clamped"] < accepted["fixed"] - 0.2  # 2.32 and 2.63 when it was written
    assert variants["clamped"]["what"].startswith("It survives and reports nothing, but ")


@pytest.fixture
def judges(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    outcome = importlib.import_module("harness.processes").Outcome
    return importlib.import_module("page_clamp"), outcome


@pytest.fixture
def run(judges, tmp_path):
    """A run that left this log, these tokens and this accept length."""

    def made(accepted=2.6, tokens=RIGHT, status=0, log=(FIRED, UP)):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        path.write_text("\n".join(log))
        result = {"tokens": tokens, "accept_length": accepted} if status == 0 else {}
        return judges[1]("variant", status, 1.0, path, result)

    return made


def test_what_is_worse_passes_as_clamped_and_not_as_fixed(judges, run):
    clean = run()
    for worse, word in (
        (run(accepted=2.3), "the mean accept length is 2.30 instead of 2.60"),
        (run(tokens=[[1, 2, 3], [4, 5, 7]]), "1 of 2 outputs are wrong"),
    ):
        clamped, fixed = judges[0].judge_clamped(worse, clean), judges[0].judge_fixed(worse, clean)
        assert (clamped.good, fixed.good) == (True, False)
        assert word in clamped.what
        assert word in fixed.what


def test_what_is_not_worse_passes_as_fixed_and_not_as_clamped(judges, run):
    clean, same = run(), run(accepted=2.58)
    assert judges[0].judge_fixed(same, clean).good
    verdict = judges[0].judge_clamped(same, clean)
    assert (verdict.good, verdict.what) == (
        False,
        "It survives, and nothing is worse than in the clean run.",
    )


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"status": 1}, "did not complete (exit status 1)"),
        ({"status": None}, "It took too long and was stopped after 1 s."),
        ({"log": (UP,)}, "the fault did not fire"),
    ],
)
def test_runs_that_prove_nothing(judges, run, given, word):
    clean, poor = run(), run(accepted=2.3, **given)
    for judge in (judges[0].judge_clamped, judges[0].judge_fixed):
        assert not judge(poor, clean).good
        assert word in judge(poor, clean).what
        assert not judge(run(accepted=2.3), None).good
    # As the clean run it is as bad as what is judged, if it is one at all.
    same = run(accepted=2.3)
    assert not judges[0].judge_clamped(same, poor).good
    assert judges[0].judge_fixed(same, poor).good is poor.completed


@pytest.mark.parametrize("last", ["  dump:     x.pt", "  no dump:  0 dumps were written"])
def test_a_clamp_that_told_somebody_is_not_the_seeds(judges, run, last):
    verdict = judges[0].judge_clamped(run(accepted=2.3, log=(FIRED, UP, TOLD, last)), run())
    assert not verdict.good
    assert "a finding is in its log" in verdict.what
