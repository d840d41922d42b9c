"""repro/ranks.py: its verdicts on runs that must not pass. No test runs its engines."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

REPRO = Path(__file__).parents[2] / "repro"
TRACERS = ("page-table", "pool-leak", "flight-recorder")


@pytest.fixture
def ranks(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    return importlib.import_module("suites.ranks")


@pytest.fixture
def run(ranks, tmp_path):
    """A run of two ranks that must pass."""
    log = tmp_path / "mode.log"
    log.write_text("g4debug-repro: engine up\n")
    checked = {f"rank {r}": {t: {"off": "", "count": 5 + r} for t in TRACERS} for r in (0, 1)}
    result = {"outputs": {"a": {}}, "s": 2.0, "accept_length": 1.8, "checked": checked}
    return importlib.import_module("harness.processes").Outcome("mode", 0, 1.0, log, result)


@pytest.fixture
def judged(ranks, run, tmp_path, monkeypatch):
    """Judges the run with findings of these tracers in its dumps, in a mode that may repair."""

    def judge(*found: str, repaired: str = ""):
        dumps = tmp_path / "dumps"
        dumps.mkdir()
        for number, tracer in enumerate(found):
            (dumps / f"{number}-{tracer}.pt").touch()
        monkeypatch.setattr(
            ranks.reading,
            "read",
            lambda path: SimpleNamespace(
                finding=SimpleNamespace(check=path.stem.partition("-")[2], headline="found")
            ),
        )
        return ranks.judge("mode", ranks.Mode("a mode", {}, repaired=repaired), run, dumps)

    return judge


def test_what_must_pass_passes(judged):
    seen = judged()
    assert seen.good
    assert seen.checked == {"page-table": 5, "pool-leak": 5}  # those of the rank with fewest


def test_repairs_are_the_only_findings_that_there_may_be(judged):
    assert judged("page-table", "page-table", repaired="page-table").good


def test_a_repair_that_makes_ranks_differ_is_no_pass(judged):
    seen = judged("page-table", "rank-divergence", repaired="page-table")
    assert not seen.good
    assert "A false finding" in seen.what


def test_no_repair_where_there_must_be_some_is_no_pass(judged):
    assert "nothing is shown" in judged(repaired="page-table").what


def test_a_finding_is_no_pass(judged):
    assert "A false finding" in judged("page-table").what


def test_a_tracer_that_checked_nothing_on_one_rank_is_no_pass(judged, run):
    run.result["checked"]["rank 1"]["pool-leak"]["count"] = 0
    assert "checked nothing: pool-leak" in judged().what


def test_a_tracer_that_one_rank_does_not_have_is_told(judged, run):
    del run.result["checked"]["rank 1"]["pool-leak"]
    assert judged().said == {"pool-leak": "not armed"}


def test_the_status_of_one_rank_is_no_pass(judged, run):
    del run.result["checked"]["rank 1"]
    assert "two schedulers" in judged().what


def test_a_server_that_died_of_something_else_is_no_false_finding(judged, run):
    run.status = 1
    seen = judged("flight-recorder")
    assert not seen.good
    assert "false" not in seen.what
