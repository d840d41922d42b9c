"""decode_paths.py compares a server with paths with one without: some path has to be active."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import decode_paths

from g4debug.fixes.paths import base

pytestmark = pytest.mark.once("the code is ours alone")


@pytest.fixture
def log(monkeypatch, caplog):
    """What the paths' own functions log."""
    monkeypatch.setattr(base, "_said", set())
    caplog.set_level("INFO", "g4debug")
    return lambda: "\n".join(r.getMessage() for r in caplog.records)


def test_the_paths_that_are_active(log):
    base.say("ple-tail", "layer 0", "")
    base.say("ple-tail", "layer 0 of the draft", "")
    base.say("triple-rmsnorm", "layer 0", "")
    base.say("fused-router", "layer 0", "the device is cpu")
    assert decode_paths.active(log()) == ["ple-tail", "triple-rmsnorm"]


def test_without_one_there_is_nothing_to_compare(log):
    """As with 26B-A4B on 0.5.23: what is on there is on in a prefill only."""
    base.say("ple-tail", "layer 0", "this layer has no per-layer embedding")
    base.once("yoco-fast-prefill", "on: layers 15 to 34 of 35 run on the rows that are read")
    with pytest.raises(SystemExit, match=r"no performance path is active[\s\S]*no per-layer"):
        decode_paths.active(log())
    with pytest.raises(SystemExit, match="the same as the one without"):
        decode_paths.active("")
