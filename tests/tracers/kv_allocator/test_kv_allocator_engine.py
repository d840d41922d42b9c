"""The kv-allocator tracer on a real engine: silent where all is well, and what it contains."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive
from releases import story

from g4debug.hooking import targets

pytestmark = ENGINE
DRIVER = Path(__file__).with_name("drive_swa_engine.py")
TRACE = {"G4DEBUG_TRACE": "kv-allocator"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All engines."""
    folder = tmp_path_factory.mktemp("engine")

    def run(name, waves, **environ):
        command = (str(DRIVER), str(waves), '{"log_level": "info"}')
        return lambda: drive(folder / name, *command, **environ)

    contain = "seed=4;double-free=5%6*on;free-unallocated=5%3*on"
    return WhenAsked(
        plain=run("plain", 1),
        plain_long=run("plain_long", 4),
        healthy=run("healthy", 4, **TRACE),
        contain=run("contain", 1, **TRACE, G4DEBUG_MODE="contain", G4DEBUG_FAULTS=contain),
        early=run("early", 1, **TRACE, G4DEBUG_FAULTS="early-swa-free=1*on"),
    )


@pytest.mark.long("two engines with much load; test_page_table_engine.py has less")
def test_a_healthy_workload_is_silent_and_its_tokens_are_the_same(runs):
    run, plain = runs["healthy"], runs["plain_long"]
    assert run.status == plain.status == 0, run.log[-3000:]
    assert "KV cache pool is full. Retract requests" in run.log  # it was hard enough
    assert run.dumps == []
    assert "the page ledger is off" not in run.log
    assert run.result == plain.result
    assert set(run.result) == {"first", "again", "last"}


def test_contain_serves_on_as_if_the_frees_had_been_right(runs):
    run = runs["contain"]
    assert run.status == 0, run.log[-3000:]
    assert run.result["first"] == runs["plain"].result["first"]
    assert "leak detected" not in run.log  # SGLang's own count of its pages
    kinds = {d.finding.kind for d in run.dumps}
    assert kinds == {"double-free", "free-unallocated"}
    for record in run.dumps:
        assert record.events[-1].kind == "free"
        assert record.finding.headline in run.log


def test_an_early_eviction_stops_the_server_and_names_the_request(runs):
    run = runs["early"]
    assert run.status != 0
    assert not run.results
    (record,) = run.dumps
    finding = record.finding
    assert finding.kind == "evicted-in-window"
    assert finding.location.request in finding.headline
    assert story(record.events)[-2:] == ["extend", "evict"]
    # The fault frees where SGLang decides about it: in a function, or behind one.
    behind = targets.path("batch.maybe_evict_swa") is not None
    caller = "eagle_prepare_for_decode" if behind else "maybe_evict_swa"
    assert record.events[-1].caller.endswith(caller)
    assert "g4debug.trapping.trap.TrapError: " + finding.headline in run.log
