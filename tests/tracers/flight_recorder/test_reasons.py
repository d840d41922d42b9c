"""What the reasons claim beyond SGLang's figures: a deadlock, and the order of the queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.tracers.flight_recorder import admission, reasons, shares
from g4debug.tracers.flight_recorder.admission import Refusal
from g4debug.tracers.flight_recorder.shares import Shares
from g4debug.tracers.flight_recorder.work import Place, Work


def request(rid: str) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, req_pool_idx=None)


@pytest.fixture
def scheduler(monkeypatch):
    refused = Refusal("SWA pool: needs 512, has 64", admission.SWA, 449, 513, 768)
    monkeypatch.setattr(admission, "refusal", lambda *_: refused)
    monkeypatch.setattr(shares, "shares", lambda *_: Shares((), 0, 0, 64, 0))
    return SimpleNamespace(waiting_queue=[], schedule_policy="fcfs", enable_lora=False)


def test_who_waits_for_a_prompt_that_goes_on_is_in_no_deadlock(scheduler):
    waits, chunk = Work(request("waits"), Place.QUEUE), Work(request("long"), Place.CHUNK)
    scheduler.waiting_queue = [waits.request]
    items = [chunk, waits]
    assert not reasons.of(scheduler, waits, items, steps=True).deadlock
    found = reasons.of(scheduler, waits, items, steps=False)
    assert found.deadlock
    assert found.verdict.startswith("A deadlock. It lacks 449 tokens of the SWA pool, no request")


@pytest.mark.parametrize("lora", [False, True])
def test_only_without_adapters_the_first_stops_all_others(scheduler, lora):
    scheduler.enable_lora = lora
    scheduler.waiting_queue = [request("first"), request("second")]
    item = Work(scheduler.waiting_queue[1], Place.QUEUE)
    line = reasons.of(scheduler, item, [item], steps=True).line
    assert "The first is first: SWA pool: needs 512" in line
    assert ("passes over one whose LoRA adapter has no place" in line) is lora
