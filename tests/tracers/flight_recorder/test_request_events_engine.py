"""What ``doctor --request`` tells of real requests, against what SGLang itself says of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import drive_requests
import pytest
import watched_engine
from real_engine import ENGINE, Run, started

from g4debug import cli
from g4debug.dumps import reading
from g4debug.findings.record import TrapRecord
from g4debug.reporters.way import GIVES, TAKES, Moment, Way, follow

pytestmark = ENGINE
PAGE = 64


def doctor(*arguments: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["doctor", *map(str, arguments)]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], TrapRecord, Any]:
    """What SGLang says, a dump of the server that runs, and what doctor says of one request."""
    folder = tmp_path_factory.mktemp("requests")
    command = drive_requests.__file__
    with started(folder, command, SGLANG_TRTLLM_MHA_DEBUG="1") as (process, log):
        run = watched_engine.Run(process, log, folder)
        run.wait_for("RESULT")
        pid = run.scheduler().pid
        lives = json.loads(doctor("--pid", pid, "--request", "liv", "--json"))
        doctor("--pid", pid, "--tape", folder / "live.pt")
        assert run.dumps() == [], "a dump that was asked for must not stay in the folder"
        text = run.text
    return Run(0, text, []).result, reading.read(Path(folder / "live.pt")), lives


def of(way: Way, kind: str) -> list[Moment]:
    return [m for m in way.moments if m.kind == kind]


def test_each_request_is_told_as_sglang_counts_it(told: Any) -> None:
    truth, record, _ = told
    assert sum(one["num_retractions"] for one in truth) > 0, "none was retracted"
    for one in truth:
        way = follow(record, one["rid"])
        assert way.state == "ended"
        assert way.prompt == one["prompt"]
        assert way.output == one["completion_tokens"]
        assert len(of(way, "retracted")) == one["num_retractions"]
        if not one["num_retractions"]:
            assert way.matched == one["cached_tokens"]
        assert way.verifies is not None
        assert way.verifies.count >= one["spec_verify_ct"]
        assert way.unknown == []


def test_the_pages_of_each_request_fit_its_length(told: Any) -> None:
    truth, record, _ = told
    for one in truth:
        way = follow(record, one["rid"], everything=True)
        events = [e for m in way.moments for e in m.events if e.pool == "full"]
        taken = sum(e.count for e in events if e.kind in GIVES)
        given = sum(e.count for e in events if e.kind in TAKES and e.request == one["rid"])
        assert 0 <= given <= taken
        # On 0.5.12 each verify gives back what it did not need.
        verified = [e for e in events if e.kind in TAKES and "eagle_info" in e.caller]
        taken -= sum(e.count for e in verified)
        if not one["num_retractions"]:
            needs = -(-(one["prompt"] + one["completion_tokens"] - 1) // PAGE) - way.matched // PAGE
            assert needs <= taken <= needs + 1, "a draft may need one page more"


def test_chunks_follow_each_other_from_the_match_to_the_end_of_the_prompt(told: Any) -> None:
    truth, record, _ = told
    for one in truth:
        chunks = [e for e in record.requests if e.request == one["rid"] and e.kind == "chunk"]
        assert chunks[0].begin == follow(record, one["rid"]).matched
        for before, chunk in itertools.pairwise(chunks):
            assert chunk.begin == before.end or before.end == before.tokens
        assert chunks[-1].end == chunks[-1].tokens
    assert len([e for e in record.requests if e.request == "shared" and e.kind == "chunk"]) > 1


def test_the_prefix_is_the_other_requests(told: Any) -> None:
    way = follow(told[1], "shared")
    assert way.matched > 0
    (match,) = of(way, "match")
    assert "request first had the same ones first" in match.text


def test_an_abort_is_asked_for_and_ends_it(told: Any) -> None:
    way = follow(told[1], "aborted")
    assert [m.kind for m in way.moments if m.kind in ("abort", "ends")] == ["abort", "ends"]
    assert way.state_text == "aborted"


def test_the_one_that_runs_is_asked_of_the_server(told: Any) -> None:
    lives = told[2]
    assert (lives["request"], lives["state"]) == ("lives", "decode")
    assert lives["output"] >= 20
    assert lives["held"]["full"] >= -(-220 // PAGE)
    assert lives["headline"].startswith("request lives: in decode for ")
