"""What keeps a request out before memory is asked for: rows, priorities, adapters, delays."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from g4debug.hooking import targets
from g4debug.tracers.flight_recorder import admission, gates
from g4debug.tracers.flight_recorder.work import Place, Work


def request(rid: str, **more) -> SimpleNamespace:
    more = {"lora_id": None, "finished": lambda: False, **more}
    return SimpleNamespace(rid=rid, **more)


def server(*running, **more) -> SimpleNamespace:
    batch = SimpleNamespace(reqs=list(running), batch_is_full=False)
    return SimpleNamespace(running_batch=batch, **more)


def priorities(low_first: bool) -> SimpleNamespace:
    return server(
        request("a", priority=5), request("b", priority=1),
        priority_scheduling_preemption_threshold=2,
        schedule_low_priority_values_first=low_first,
    )  # fmt: skip


def test_running_requests_are_named_with_their_priorities():
    told = gates.priority(priorities(False), request("waits", priority=5))
    assert "more than 2 below its own, 5: a has 5, b has 1; 1 of them are" in told
    told = gates.priority(priorities(False), request("waits", priority=3))
    assert told.endswith("none of them is")  # SGLang's threshold is to be exceeded
    told = gates.priority(priorities(True), request("waits", priority=2))
    assert "more than 2 above its own, 2" in told
    assert "1 of them are" in told


def test_where_all_that_ran_have_ended_none_is_named():
    scheduler = priorities(False)
    for ended in scheduler.running_batch.reqs:
        ended.finished = lambda: True
    told = gates.priority(scheduler, request("waits", priority=5))
    assert told.endswith("5: none, for all that ran have ended")


FULL = admission.Refusal("full pool: needs 40 for 20 tokens, has 10", admission.FULL, 30, 40, 30)
ROWS = admission.Refusal("request rows: needs 1, has 0; 2 requests run", admission.ROWS, 1, 1)
OPEN = admission.Refusal("not known: it needs 20 tokens")
ENDS = "SGLang asks for no request until one of the 2 running ones ends: the batch counts as full"


@pytest.mark.parametrize(
    ("found", "swa", "more", "words"),
    [
        (FULL, None, {}, f"{FULL.words}; {ENDS}"),
        (ROWS, None, {}, f"{ROWS.words}; {ENDS}"),
        (OPEN, None, {}, f"{ENDS}; the figures"),
        (FULL, 100, {}, FULL.words),
        (ROWS, None, {"enable_priority_preemption": True}, ROWS.words),
    ],
)
def test_a_batch_that_counts_as_full_hides_no_reason(monkeypatch, found, swa, more, words):
    """SGLang has refused one before, and asks for none in most of its rounds then."""
    busy = server(request("a"), request("b"), **more)
    busy.running_batch.batch_is_full = True
    monkeypatch.setattr(admission, "_if_asked", lambda *_: found)

    class Left(SimpleNamespace):
        def __str__(self) -> str:
            return "the figures"

    monkeypatch.setattr(admission, "_left", lambda _: Left(swa=swa))
    told = admission.refusal(busy, Work(request("waits"), Place.QUEUE))
    assert told.words == words
    assert (told.pool, told.never) == (found.pool, found.never)
    busy.running_batch.batch_is_full = False
    assert admission.refusal(busy, Work(request("waits"), Place.QUEUE)) is found


class Loras:
    """SGLang's manager of adapters, with room for two."""

    max_loras_per_batch, num_pinned_loras = 2, 0

    def __init__(self) -> None:
        self.lora_refs = {"1": SimpleNamespace(lora_name="sql"), "2": None, "3": None}
        self.memory_pool = SimpleNamespace(uid_to_buffer_id={"1": 0, "2": 1})

    def validate_lora_batch(self, uids) -> bool:
        return len(uids) <= 2


def adapters(*running, **more) -> SimpleNamespace:
    runner = SimpleNamespace(lora_manager=Loras())
    worker = SimpleNamespace(model_runner=runner)
    return server(*running, enable_lora=True, tp_worker=worker, **more)


def test_an_adapter_without_a_place_is_told_with_those_that_have_one():
    busy = adapters(request("a", lora_id="1"), request("b", lora_id="2"))
    told = gates.lora(busy, request("waits", lora_id="3"))
    assert told == (
        "LoRA: no place for its adapter; it asks for 3; of at most 2 at a time 2 run (2, sql); "
        "loaded are 2, sql"
    )
    assert gates.lora(busy, request("waits", lora_id="2")) == ""
    assert gates.lora(adapters(request("a", lora_id="1")), request("waits", lora_id="3")) == ""


def test_an_adapter_that_ended_has_left_its_place_and_a_chunk_has_one():
    ended = request("a", lora_id="1", finished=lambda: True)
    busy = adapters(ended, request("b", lora_id="2"))
    assert gates.lora(busy, request("waits", lora_id="3")) == ""
    busy.chunked_req = request("long", lora_id="1")
    assert gates.lora(busy, request("waits", lora_id="3"))


def test_an_adapter_that_is_drained_and_one_that_is_loaded_beside_the_computation():
    stats = {"1": SimpleNamespace(is_draining_for="3")}
    drainer = SimpleNamespace(adapter_to_stats=stats, can_schedule=lambda _: False)
    busy = adapters(request("a", lora_id="1"), lora_drainer=drainer)
    told = gates.lora(busy, request("waits", lora_id="1"))
    assert told.startswith("LoRA: SGLang drains its adapter to make place for 3; it asks for sql;")
    busy = adapters(enable_lora_overlap_loading=True)  # to ask SGLang would begin to load it
    assert "is not loaded" in gates.lora(busy, request("waits", lora_id="3"))
    assert gates.lora(busy, request("waits", lora_id="2")) == ""


@pytest.mark.skipif(targets.matches("<0.5.15"), reason="it has no such delayer yet")
def test_few_slots(sglang):
    from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer

    delays = server(request("a"), min_free_slots_delayer=MinFreeSlotsDelayer(4))
    assert "3 requests may begin now" in gates.few_slots(delays, 3)
    assert "before 4 may" in gates.few_slots(delays, 3)
    assert gates.few_slots(delays, 4) == ""
    assert gates.few_slots(server(min_free_slots_delayer=MinFreeSlotsDelayer(4)), 3) == ""
    assert gates.few_slots(server(), 0) == ""


def test_beams_need_a_row_each():
    beams = server(
        get_num_allocatable_reqs=lambda _, width: 3 // width,
        req_to_token_pool=SimpleNamespace(available_size=lambda: 3),
    )
    wide = request("waits", beam_group=SimpleNamespace(beam_width=4))
    assert "needs 4, one for each beam, and 3 are free" in gates.beams(beams, wide)
    wide.beam_group.beam_width = 3
    assert gates.beams(beams, wide) == ""
    assert gates.beams(beams, request("waits")) == ""


def test_the_prefill_delayer_says_for_how_long_it_has_put_prefills_off():
    state = SimpleNamespace(delayed_count=7, start_time=time.perf_counter() - 12)
    delayer = SimpleNamespace(_curr_state=state, _max_delay_passes=30)
    told = gates.delayed(server(prefill_delayer=delayer))
    assert "in 7 rounds, for 12 s; it does so in less than 30" in told
    delayer._curr_state = None
    assert "delays no prefill now" in gates.delayed(server(prefill_delayer=delayer))
    assert gates.delayed(server()) == ""


def test_a_grammar_is_told_with_its_kind_and_the_limit_and_without_its_text():
    manager = SimpleNamespace(
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=10_000, SGLANG_GRAMMAR_POLL_INTERVAL=0.03
    )
    waits = request("waits", grammar_key=("json", '{"secret": 1}'), grammar_wait_ct=12)
    told = admission.refusal(server(grammar_manager=manager), Work(waits, Place.GRAMMAR)).words
    assert told == (
        "grammar of the kind json: SGLang has looked 12 times, once in a round and for up to "
        "0.03 s, and ends the request after 10000 times"
    )
    assert gates.grammar(server(), request("waits")) == "grammar of no known kind"


class Adder:
    """A PrefillAdder whose pool has room for states of linear layers of 10 tokens each."""

    _mamba_slot_cost, rem_mamba_slots = 10, 0

    def _mamba_gap_budget_for_req(self, _, *, include_host_hit: bool = False) -> int:
        return 20 if include_host_hit else 10


@pytest.mark.parametrize("slots", [0, 1])
def test_slots_for_the_state_of_linear_layers(slots):
    adder = Adder()
    adder.rem_mamba_slots = slots
    reserve, refused = admission._slots(adder, request("waits"), False)
    assert reserve == 20
    assert refused.words.startswith(
        f"mamba slots: needs 2 for its state of linear layers, has {slots}"
    )
    adder.rem_mamba_slots = 2
    assert admission._slots(adder, request("waits"), False) == (20, None)
    assert admission._slots(adder, request("waits"), True) == (10, None)
