"""Where a page is one token, a real engine is judged like any other: silent when sound, and each
fault found, with the request that the token belongs to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

from g4debug.hooking import targets

pytestmark = [
    *ENGINE,
    pytest.mark.skipif(
        targets.matches(">=0.5.15"),
        reason="this SGLang has no attention backend for Gemma-4 with pages of one token on a CPU",
    ),
]
DRIVER = Path(__file__).with_name("drive_page_one.py")
TRACE = {"G4DEBUG_TRACE": "kv-integrity,kv-allocator,pool-leak", "G4DEBUG_LEAK_STEPS": "3"}
LOG = {**TRACE, "G4DEBUG_MODE": "log"}
DATA = "seed=2;kv-nan=1*full;kv-bit-flip=1*swa(3)@step=8;kv-write-freed=1*full"
EARLY = "seed=4;early-swa-free=1*on"
FREES = "seed=4;double-free=1*on;lost-free=1*on@at=3"
# In log mode SGLang's own assertions would end the engine after a double free, or at idle.
CONTAIN = {
    **TRACE,
    "G4DEBUG_MODE": "contain",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
}
FIRED = re.compile(r"g4debug fault \(seed=\d+\) ([a-z-]+) #1: (.*) \[step (\d+): ")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")
    return WhenAsked(
        sound=lambda: drive(folder / "sound", str(DRIVER), **TRACE),
        data=lambda: drive(folder / "data", str(DRIVER), **LOG, G4DEBUG_FAULTS=DATA),
        early=lambda: drive(folder / "early", str(DRIVER), **LOG, G4DEBUG_FAULTS=EARLY),
        frees=lambda: drive(folder / "frees", str(DRIVER), **CONTAIN, G4DEBUG_FAULTS=FREES),
    )


def fired(run):
    assert run.status == 0, run.log[-4000:]
    assert not re.search(r"tracer [a-z-]+ failed|page ledger failed", run.log)
    return {name: (what, int(step)) for name, what, step in FIRED.findall(run.log)}


def found(run, kind, layer_kind):
    return next(
        f.finding
        for f in run.dumps
        if (f.finding.kind, f.finding.location.layer_kind) == (kind, layer_kind)
    )


def test_a_sound_server_is_silent(runs):
    run = runs["sound"]
    assert run.status == 0, run.log[-4000:]
    assert run.result == [[24, 6, 40, 12]] * 2
    assert "checks nothing" not in run.log
    assert not run.dumps


def test_data_that_changes_is_found(runs):
    run = runs["data"]
    what = fired(run)
    assert set(what) == {"kv-nan", "kv-bit-flip", "kv-write-freed"}
    for fault, kind, layers in (
        ("kv-nan", "kv-changed", "full"),
        ("kv-bit-flip", "kv-changed", "sliding"),
        ("kv-write-freed", "write-after-free", "full"),
    ):
        said, step = what[fault]
        pool, page = re.search(r"(full|swa) page (\d+)", said).groups()
        finding = found(run, kind, layers)
        assert f"{pool.upper()} page {page}" in finding.headline
        if kind == "kv-changed":  # the others are found when the page is handed out again
            assert finding.location.step <= step + 1
            assert finding.location.request == re.search(r"of (wave\S+)", said)[1]


def test_an_eviction_inside_the_window_is_found(runs):
    run = runs["early"]
    said, step = fired(run)["early-swa-free"]
    token, rid = re.search(r"tokens (\d+)\.\.\d+ of (\S+),", said).groups()
    finding = found(run, "evicted-in-window", "sliding")
    assert finding.location.request == rid
    assert finding.location.step == step
    assert f"tokens {token}..{token} of request {rid}" in finding.got


def test_frees_that_are_lost_or_doubled_are_found(runs):
    run = runs["frees"]
    what = fired(run)
    assert set(what) == {"double-free", "lost-free"}
    kinds = {(record.finding.check, record.finding.kind) for record in run.dumps}
    assert ("kv-allocator", "double-free") in kinds
    assert any(check == "pool-leak" for check, _ in kinds)
