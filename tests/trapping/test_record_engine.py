"""What a real scheduler's dump says of where, with which arguments and in which step."""

from __future__ import annotations

import platform
import re

import pytest
import releases
from real_engine import ENGINE, drive
from watched_engine import DRIVER

from g4debug.trapping.sanitise import DEFAULT, SET

pytestmark = ENGINE
SECRET = "s3cr3tVALUE"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The dump of pages that were freed twice."""
    # Speculative decoding v2 frees only when a request ends; v1 also what a verify has rejected.
    earlier = 6 if releases.has_v1_worker() else 2
    run = drive(
        tmp_path_factory.mktemp("engine"),
        str(DRIVER),
        G4DEBUG_FAULTS=f"seed=1;double-free={earlier}*off->1*on",
        G4DEBUG_TRACE="kv-allocator,page-table",
        SGLANG_API_KEY=SECRET,
    )
    (dump,) = run.dumps
    fired = re.search(r"g4debug fault \(seed=1\) double-free #1: .* \[step (\d+): ", run.log)
    return dump, int(fired[1]), run.log


def test_where_it_was_made(record):
    dump, _, _ = record
    at = dump.finding.location
    assert at.host == platform.node()
    assert (at.dp_rank, at.rank, at.pp_rank) == (0, 0, 0)
    assert at.pid > 0


def test_the_servers_arguments_without_secrets(record):
    dump, _, _ = record
    assert dump.arguments["page_size"] == 64
    assert dump.arguments["disable_cuda_graph"] is True
    assert "/" not in dump.arguments["model_path"]
    assert dump.defaults["disaggregation_mode"] == "null"
    assert dump.defaults["api_key"] == DEFAULT
    assert dump.environment["SGLANG_API_KEY"] == SET
    assert dump.geometry["num_hidden_layers"] > 0
    assert SECRET not in repr(dump)


def test_an_allocation_counts_for_the_step_that_it_is_made_for(record):
    """SGLang allocates for a batch before it runs it; the step begins when it runs."""
    dump, fired, _ = record
    ran = {}
    for step in dump.steps:
        for rid in step.rids:
            ran.setdefault(rid, set()).add(step.step)
    made = [e for e in dump.allocator if e.kind == "extend" and e.request in ran]
    assert made
    for event in made:
        assert event.step in ran[event.request], event
    assert dump.finding.location.step == fired == dump.events[-1].step


def test_the_free_that_was_prevented_says_so(record):
    dump, _, _ = record
    assert dump.finding.kind == "double-free"
    assert [e.stopped for e in dump.events[-2:]] == [False, True]
    assert not any(e.stopped for e in dump.allocator)
