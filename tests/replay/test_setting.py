"""Which tracers a replay arms."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from g4debug import discovery
from g4debug.dumps import reading
from g4debug.replay import setting

HUNG = Path(__file__).with_name("parked-chunk-0.5.23.pt")
FOUND = Path(__file__).with_name("locked-prefix-0.5.12.post1.pt")


def test_where_no_tracer_made_the_finding_all_that_look_at_one_rank_are_armed():
    record = reading.read(HUNG)
    assert record.finding.check == "flight-recorder"
    assert set(setting.tracers_of(record)) == {*discovery.names("tracer")} - {"rank-divergence"}
    without = dataclasses.replace(record, tracers=())  # nothing was armed there
    assert setting.tracers_of(without) == setting.tracers_of(record)


def test_where_one_did_those_that_were_armed_there_are():
    record = reading.read(FOUND)
    armed = setting.tracers_of(record)
    assert record.finding.check in armed
    assert armed == tuple(t.name for t in record.tracers if t.mode)
    assert "kv-integrity" not in armed
