"""benchmarks/served/clock.py: whose the time is, also behind the launch of a step."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def clock(monkeypatch):
    """The clock, whose second passes whenever somebody looks at it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("served.clock")
    monkeypatch.setattr(found, "_round", {})
    monkeypatch.setattr(found, "_owners", [""])
    now = iter(range(1000))
    monkeypatch.setattr(found.time, "perf_counter", lambda: next(now))
    return found


def test_what_is_behind_the_launch_is_told_apart(clock):
    pool = clock._as("pools", lambda: None)
    sglang = clock._as("", pool, clock.BEHIND)  # the launch asks a place that is ours, too
    assert clock._as(clock.LAUNCH, lambda: (sglang(), "done")[1])() == "done"
    assert clock._round == {clock.LAUNCH: [1, 1.0], "pools": [1, 1.0], clock.BEHIND: [1, 1.0]}
    assert clock._owners == [""]


def test_elsewhere_a_site_has_its_time_before_and_after(clock):
    sglang = clock._as("", lambda: None)
    clock._as("cache.release", sglang)()
    assert clock._round == {"cache.release": [1, 2.0]}


def test_a_launch_that_fails_leaves_the_clock_as_it_was(clock):
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock._as(clock.LAUNCH, clock._as("", fails, clock.BEHIND))()
    assert clock._owners == [""]
    assert clock._round == {clock.LAUNCH: [1, 1.0], clock.BEHIND: [1, 1.0]}
