"""repro/fuzz.py --narrow: who stands must be told, and who is served must not be accused."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from sample_trap import sample_record

from g4debug.dumps import writing

REPRO = Path(__file__).parents[2] / "repro"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="needs sglang: a server's kind depends on its release",
)
RECORDER = "flight-recorder"


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """``judged(status, stood, findings)``: whether a server is good, and what is said of it."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(REPRO))
    narrow = importlib.import_module("suites.fuzz.narrow")

    def judge(status, stood, *findings):
        for n, (check, kind) in enumerate(findings):
            record = sample_record()
            told = dataclasses.replace(
                record.finding, check=check, kind=kind, headline=f"g4debug: {check} {kind}"
            )
            data = writing.encode(dataclasses.replace(record, finding=told))
            writing.write(data, tmp_path / "dumps", f"{n}.pt")
        log = tmp_path / "armed.log"
        log.write_text("")
        result = {"requests": 7, "stood": stood, "refused": 1} if status == 0 else {}
        return narrow.judge(narrow.Outcome("armed", status, 9.0, log, result), tmp_path)

    return judge


@pytest.mark.parametrize("kind", ["hang", "starved"])
def test_who_stands_and_is_told_is_good(judged, kind):
    good, said = judged(0, 2, (RECORDER, kind))
    assert good
    assert said == f"7 requests, 1 refused, 2 stood: g4debug: {RECORDER} {kind}."


def test_who_stands_and_is_not_told_is_bad(judged):
    assert judged(0, 2) == (False, "7 requests, 1 refused, 2 stood: that was not told.")


@pytest.mark.parametrize("kind", ["killed", "exception"])
def test_only_a_finding_that_says_it_stands_tells_it(judged, kind):
    good, said = judged(0, 1, (RECORDER, kind))
    assert not good
    assert said.endswith("that was not told.")


@pytest.mark.parametrize("kind", ["hang", "starved"])
def test_who_is_told_and_was_served_is_bad(judged, kind):
    good, said = judged(0, 0, (RECORDER, kind))
    assert not good
    assert said.endswith(f"0 stood, but it was told: g4debug: {RECORDER} {kind}")


def test_who_is_served_in_silence_is_good(judged):
    assert judged(0, 0) == (True, "7 requests, 1 refused, 0 stood.")


def test_who_dies_must_be_told_too(judged):
    assert judged(1, 0) == (False, "It did not complete (exit status 1). Nothing told it.")
    good, said = judged(1, 0, (RECORDER, "exception"))
    assert good
    assert said == f"It did not complete (exit status 1). g4debug: {RECORDER} exception"


def test_that_it_stood_does_not_tell_why_it_died(judged):
    assert not judged(1, 0, (RECORDER, "hang"))[0]


def test_who_never_ends_is_told_by_who_says_that_it_stands(judged):
    assert not judged(None, 0)[0]
    good, said = judged(None, 0, (RECORDER, "hang"))
    assert good
    assert said == f"It took too long and was stopped after 9 s. g4debug: {RECORDER} hang"


@pytest.mark.parametrize(("status", "stood"), [(0, 0), (0, 2), (1, 0)])
def test_any_other_finding_is_bad(judged, status, stood):
    found = (("page-table", "stale"), (RECORDER, "hang"))
    assert judged(status, stood, *found) == (False, "A finding: g4debug: page-table stale")
