"""Two real ranks: healthy ones are silent, one that decides for itself is found in its step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from real_engine import ENGINE, WhenAsked, drive

pytestmark = [*ENGINE, pytest.mark.long("five engines of two ranks")]
DRIVER = str(Path(__file__).with_name("drive_ranks.py"))
ARMED = {"G4DEBUG_TRACE": "rank-divergence,flight-recorder"}
SMALL = json.dumps({"max_total_tokens": 2560})  # requests are retracted, prefixes evicted
STILL = json.dumps({"max_total_tokens": 2560, "disable_overlap_schedule": True})
STRESS = "seed=3;forced-retract=3*on;abort-request=3*on"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")

    def run(name: str, *arguments: str, **environ: str):
        return lambda: drive(folder / name, DRIVER, *arguments, seconds=500, **ARMED, **environ)

    return WhenAsked(
        mtp=run("mtp", "mtp", SMALL, G4DEBUG_FAULTS=STRESS),
        plain=run("plain", "plain", SMALL, G4DEBUG_FAULTS="seed=3;forced-retract=3*on"),
        still=run("still", "plain", STILL, G4DEBUG_FAULTS="seed=3;forced-retract=3*on"),
        order=run("order", "mtp", G4DEBUG_FAULTS="seed=1;rank-divergence=1*on"),
        abort=run("abort", "plain", G4DEBUG_FAULTS="seed=1;rank-divergence=1*abort"),
    )


@pytest.mark.parametrize("kind", ["mtp", "plain", "still"])
def test_healthy_ranks_are_compared_in_every_step_and_found_alike(runs, kind):
    run = runs[kind]
    assert run.status == 0, run.log[-3000:]
    assert not run.dumps
    ranks = run.result["ranks"]
    assert len(ranks) == 2
    for rank in ranks.values():
        assert not rank["off"]
        assert rank["steps"] > 20
        assert rank["count"] >= rank["steps"] - 2  # the last one may not have been there yet
    assert "forced-retract #1" in run.log
    assert "is limited" not in "".join(x for x in run.log.splitlines() if "rank-div" in x)


@pytest.mark.parametrize("kind", ["order", "abort"])
def test_a_rank_that_decides_for_itself_is_found(runs, kind):
    run = runs[kind]
    fired = int(re.search(r"rank-divergence #1: .*\[step (\d+): ", run.log)[1])
    found = [r for r in run.dumps if r.finding.kind == "ranks-differ"]
    assert found, run.log[-3000:]
    first = found[0].finding
    # Requests are taken between two steps.
    assert 0 <= first.location.step - fired <= (kind == "order")
    assert " and dp0/tp" in first.headline
    words = "in another order" if kind == "order" else "aborted on one rank"
    assert words in first.cause
    # Both ranks have left a dump, whoever was first.
    assert {r.finding.location.rank for r in run.dumps} == {0, 1}
