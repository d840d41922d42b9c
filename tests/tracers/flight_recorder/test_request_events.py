"""What of a request's life is kept: its events, and nothing that it said or was sent."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from g4debug.findings.names import LONGEST_ID
from g4debug.findings.record import RequestEvent
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import request_events
from g4debug.tracers.flight_recorder.request_events import RequestEvents, how, public

SECRET = "the tenant's own words"


class TokenizedGenerateReqInput(SimpleNamespace):
    pass


class BatchTokenizedGenerateReqInput(SimpleNamespace):
    pass


class TokenizedEmbeddingReqInput(SimpleNamespace):
    pass


class AbortReq(SimpleNamespace):
    pass


class FINISH_ABORT(SimpleNamespace):
    pass


class FINISH_MATCHED_STR(SimpleNamespace):
    pass


class FINISH_MATCHED_TOKEN(SimpleNamespace):
    pass


@pytest.fixture
def context() -> Context:
    return Context.alone("flight-recorder", Settings(debug=True))


@pytest.fixture
def events(context: Context) -> RequestEvents:
    return RequestEvents(context)


def asked(rid: str, prompt: int, kind: type = TokenizedGenerateReqInput) -> Any:
    params = SimpleNamespace(max_new_tokens=9)
    return kind(rid=rid, input_ids=[7] * prompt, sampling_params=params)


def req(rid: str, prompt: int = 100, output: int = 0, reason: Any = None, **kv: int) -> Any:
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[7] * prompt,
        output_ids=[8] * output,
        finished_reason=reason,
        finished=lambda: reason is not None,
        kv_allocated_len=kv.get("allocated", 128),
        swa_evicted_seqlen=kv.get("evicted", 64),
    )


def kept(events: RequestEvents) -> list[RequestEvent]:
    return list(events.events()[0])


def test_a_life(events: RequestEvents, context: Context) -> None:
    events.messages(None, [asked("a", 100)])
    context.recorder.prepare_step()  # SGLang prepares a batch, and then its step begins
    batch = SimpleNamespace(reqs=[req("a")], prefix_lens=[16], extend_lens=[84])
    assert events.chunks("result", batch) == "result"
    context.recorder.count()
    events.released(req("a", output=3))
    events.messages(None, [AbortReq(rid="a", abort_all=False), AbortReq(rid=None, abort_all=True)])
    events.released(req("a", output=3, reason=FINISH_ABORT(message=None, status_code=None)))
    found = kept(events)
    assert [(e.step, e.request, e.kind) for e in found] == [
        (0, "a", "arrives"), (1, "a", "chunk"), (1, "a", "retracted"), (1, "a", "abort"),
        (1, "", "abort"), (1, "a", "ends"),
    ]  # fmt: skip
    arrives, chunk, retracted, _, _, ends = found
    assert (arrives.tokens, arrives.longest, arrives.number) == (100, 9, 1)
    assert (chunk.begin, chunk.end, chunk.tokens, chunk.output) == (16, 100, 100, 0)
    assert (retracted.tokens, retracted.output, retracted.note) == (103, 3, "")
    assert (ends.output, ends.allocated, ends.evicted, ends.note) == (3, 128, 64, "abort")
    assert all(e.time_ns > 0 for e in found)


def test_ids_of_megabytes_are_not_kept(events: RequestEvents, context: Context) -> None:
    long = req("a" * 10**6, reason=None)
    events.messages(None, [asked(long.rid, 100)])
    context.recorder.scheduler = SimpleNamespace(waiting_queue=[long])
    assert [(e.kind, len(e.request)) for e in kept(events)] == [
        ("arrives", LONGEST_ID), ("waits", LONGEST_ID),
    ]  # fmt: skip


def test_only_requests_that_the_tape_counts_have_a_number(events: RequestEvents) -> None:
    batch = BatchTokenizedGenerateReqInput(batch=[asked("a", 1), asked("b", 1)])
    events.messages(None, [asked("e", 5, TokenizedEmbeddingReqInput), batch, asked("c", 1)])
    assert [(e.request, e.number) for e in kept(events)] == [
        ("e", -1), ("a", 1), ("b", 2), ("c", 3)
    ]  # fmt: skip


def test_the_ring_says_how_many_it_has_lost(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_events, "KEPT", 4)
    events = RequestEvents(context)
    for i in range(6):
        events.messages(None, [asked(f"r{i}", 1)])
    found, lost = events.events()
    assert ([e.request for e in found], lost) == (["r2", "r3", "r4", "r5"], 2)
    assert found[-1].number == 6


def test_where_each_request_is_now(events: RequestEvents, context: Context) -> None:
    done = req("done", reason=FINISH_MATCHED_TOKEN())
    runs, part = req("runs", output=5), req("part", allocated=64, evicted=0)
    context.recorder.scheduler = SimpleNamespace(
        waiting_queue=[req("waits", allocated=0)],
        grammar_manager=SimpleNamespace(grammar_queue=[req("compiles")]),
        chunked_req=part,
        running_batch=SimpleNamespace(reqs=[runs, done, part]),
        last_batch=None,
    )
    now = {e.request: e for e in kept(events)}
    assert {rid: (e.kind, e.note) for rid, e in now.items()} == {
        "waits": ("waits", "waiting queue"),
        "compiles": ("waits", "grammar queue"),
        "part": ("runs", "chunk in progress"),
        "runs": ("runs", "batch"),
    }
    assert (now["runs"].output, now["part"].allocated, now["part"].evicted) == (5, 64, 0)


def test_where_requests_of_a_pipeline_and_of_disaggregation_are(
    events: RequestEvents, context: Context
) -> None:
    queue, entry = SimpleNamespace, lambda rid: SimpleNamespace(req=req(rid))
    context.recorder.scheduler = SimpleNamespace(
        waiting_queue=deque(),
        running_batch=SimpleNamespace(reqs=[]),
        running_mbs=[SimpleNamespace(reqs=[req("stage 0")]), SimpleNamespace(reqs=[req("1")])],
        disagg_prefill_bootstrap_queue=None,
        disagg_prefill_inflight_queue=[req("sent")],
        disagg_decode_prealloc_queue=queue(queue=[entry("asks")], retracted_queue=[req("again")]),
        disagg_decode_transfer_queue=queue(queue=[entry("comes")]),
    )
    assert {e.request: (e.kind, e.note) for e in kept(events)} == {
        "stage 0": ("runs", "batch"),
        "1": ("runs", "batch"),
        "sent": ("waits", "queue of transfers"),
        "asks": ("waits", "queue for the other server"),
        "again": ("waits", "queue of retracted requests"),
        "comes": ("waits", "queue of transfers"),
    }


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FINISH_MATCHED_STR(matched=SECRET), "stop: a text"),
        (FINISH_MATCHED_TOKEN(matched=17), "stop: a token"),
        (FINISH_ABORT(message="Aborted", status_code=None), "abort"),
        (
            FINISH_ABORT(message=f"invalid stop_regex '{SECRET}': bad", status_code=400),
            "abort: invalid stop_regex, HTTP 400",
        ),
        (
            FINISH_ABORT(message=f"Grammar accept_token failed: {SECRET}", status_code=500),
            "abort: Grammar accept_token failed, HTTP 500",
        ),
        (
            FINISH_ABORT(message="Out of memory even after retracting.", status_code=500),
            "abort: Out of memory even after retracting, HTTP 500",
        ),
    ],
)
def test_an_end_is_told_without_what_sglang_quotes(reason: Any, said: str) -> None:
    assert how(reason) == said
    assert SECRET not in said


def test_a_message_of_any_kind_is_cut() -> None:
    assert public(None) == ""
    assert len(public("x" * 9000)) == request_events.LONGEST
