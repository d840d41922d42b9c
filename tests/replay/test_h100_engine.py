"""Tapes of servers on a H100, or two H200, replayed on the CPU engine, each by its own release.

Recorded from ``tests/gpu/serve_shared_prefixes.py``: 400 requests, and 250 of which one meets the
fault ``cached-page-alias``; and from ``repro/soak.py``: 2,000 requests each, of which the first
steps are replayed here. "tp2" was recorded with two tensor-parallel ranks, "real-pools" on a H200
in pools of 262,144 tokens (``--tokens 262144 --together 64 --longest 6000 --requests 300``). Those
in ``h200`` are dumps of SGLang's own bugs, from a H200: cases of the history suite. What a replay
does not need, such as environment variables with paths, was taken out of the dumps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_engine import ENGINE
from warm_replay import warm_replays

from g4debug import cli
from g4debug.hooking import targets

LONG = pytest.mark.long("some hundred steps, one to three minutes")
pytestmark = ENGINE
HERE = Path(__file__).with_name("h100")
TAPES = sorted(HERE.glob("*.pt"))
# What is wrong is no page table in "cached-page-alias", so the model must compute there.
WAYS = {
    "healthy": ["--pages-only"],
    "soak": ["--pages-only", "--until", "1000"],
    "soak-tp2": ["--pages-only", "--until", "400"],
    "soak-real-pools": ["--pages-only", "--until", "120", "--trace", "flight-recorder"],
}


@LONG
@pytest.mark.parametrize("path", TAPES, ids=lambda path: path.stem)
def test_each_step_is_the_same_on_two_cores(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what, _, release = path.stem.rpartition("-")
    if str(targets.sglang_version()) != release:
        pytest.skip(f"recorded on {release}")
    with warm_replays():
        code = cli.main(["replay", str(path), "--json", *WAYS.get(what, [])])
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    begins = "reproduced: "
    if what in WAYS:  # nothing was found on those servers
        begins = "equal up to step" if "soak" in what else "nothing was found, there or here: "
    assert result["text"].startswith(begins), result["text"]
    assert ("prefix-cache" in result["text"]) == (what == "cached-page-alias")
    least, compared = (120, 2) if what == "soak-real-pools" else (290, 10)
    assert result["equal"] >= least
    assert result["pages_compared"] >= compared


@pytest.mark.parametrize(
    "path", sorted(HERE.with_name("h200").glob("*.pt")), ids=lambda path: path.stem
)
def test_a_bug_of_sglangs_own_that_a_gpu_met_comes_again(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if str(targets.sglang_version()) != path.stem.rpartition("-")[2]:
        pytest.skip("recorded on another release")
    with warm_replays():
        code = cli.main(["replay", str(path), "--json", "--pages-only"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    assert result["text"].startswith("reproduced: g4debug: "), result["text"]
    assert result["equal"] == result["steps"] > 0
