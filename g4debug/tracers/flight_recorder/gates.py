"""Says what keeps a request out before SGLang asks whether a KV pool has room for it.

Rows, priorities, adapters, beams and delays, from what SGLang itself has noted of them. Each
function returns words, '' if it is not that. Nothing is loaded, retracted or negotiated here: what
SGLang would have to do that for is called not known.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from g4debug.findings import names
from g4debug.tracers.flight_recorder.work import name

SHOWN = 4  # requests or adapters that are named


def few_slots(scheduler: Any, rows: int) -> str:
    """``--min-free-slots-delay``, and what SGLang sets for some drafts. rows: requests that may
    begin now."""
    delayer = getattr(scheduler, "min_free_slots_delayer", None)
    running = len(scheduler.running_batch.reqs)
    if delayer is None or not delayer.should_delay(running_bs=running, num_allocatable_reqs=rows):
        return ""
    return (
        f"free slots: {max(rows, 0)} requests may begin now, and while others run SGLang admits "
        f"none before {delayer._min_free_slots} may (min_free_slots_delay); {running} requests run"
    )


def priority(scheduler: Any, request: Any) -> str:
    """No row is free, and SGLang may retract requests of a lower priority (preemption)."""
    low_first = scheduler.schedule_low_priority_values_first
    sign, mine = (-1 if low_first else 1), getattr(request, "priority", None)
    threshold = scheduler.priority_scheduling_preemption_threshold
    runs = [r for r in scheduler.running_batch.reqs if not r.finished()]
    lower = [
        r
        for r in runs
        if mine is not None
        and getattr(r, "priority", None) is not None
        and (mine - r.priority) * sign > threshold
    ]
    shown = _some(f"{name(r)} has {getattr(r, 'priority', None)}" for r in runs)
    words = (
        f"request rows: needs 1, has 0; SGLang retracts a running request for it whose priority is "
        f"more than {threshold} {'above' if low_first else 'below'} its own, {mine}: {shown}"
    )
    if not runs:
        return f"{words}, for all that ran have ended"
    if lower:
        return f"{words}; {len(lower)} of them are, and it is not known if their tokens are enough"
    return f"{words}; none of them is"


def lora(scheduler: Any, request: Any) -> str:
    """Its adapter has no place in the batch, or is kept out so that another one gets its turn."""
    if not getattr(scheduler, "enable_lora", False):
        return ""
    mine = request.lora_id
    chunk = getattr(scheduler, "chunked_req", None)
    running = {r.lora_id for r in scheduler.running_batch.reqs if not r.finished()}
    if chunk is not None:
        running.add(chunk.lora_id)
    manager = scheduler.tp_worker.model_runner.lora_manager
    words = _adapters(manager, mine, running)
    drainer = getattr(scheduler, "lora_drainer", None)
    draining = drainer and getattr(drainer.adapter_to_stats.get(mine), "is_draining_for", None)
    if drainer and draining and not drainer.can_schedule(request):
        other = _adapter(manager, draining)
        return f"LoRA: SGLang drains its adapter to make place for {other}; {words}"
    if mine in running:
        return ""
    if getattr(scheduler, "enable_lora_overlap_loading", False):
        if mine in _loaded(manager):
            return ""
        return f"LoRA: its adapter is not loaded, and SGLang loads one after the other; {words}"
    if manager.validate_lora_batch({mine} | running):
        return ""
    pinned = getattr(manager, "num_pinned_loras", 0)
    kept = f", {pinned} of them for pinned ones" if pinned else ""
    return f"LoRA: no place for its adapter; {words}{kept}"


def _adapters(manager: Any, mine: Any, running: set[Any]) -> str:
    return (
        f"it asks for {_adapter(manager, mine)}; of at most {manager.max_loras_per_batch} at a "
        f"time {len(running)} run ({_some(_adapter(manager, r) for r in running)}); loaded are "
        f"{_some(_adapter(manager, r) for r in _loaded(manager))}"
    )


def _loaded(manager: Any) -> list[Any]:
    return list(manager.memory_pool.uid_to_buffer_id)


def _adapter(manager: Any, uid: Any) -> str:
    if uid is None:
        return "the model without one"
    found = getattr(manager, "lora_refs", {}).get(uid)
    return names.name(getattr(found, "lora_name", None) or str(uid))


def _some(words: Iterable[str]) -> str:
    """The first few of them, and how many more there are."""
    every = sorted(words)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return (", ".join(every[:SHOWN]) + more) or "none"


def beams(scheduler: Any, request: Any) -> str:
    """A request with beam search takes a row for each of its beams."""
    group = getattr(request, "beam_group", None)
    if group is None:
        return ""
    running = len(scheduler.running_batch.reqs)
    if scheduler.get_num_allocatable_reqs(running, group.beam_width) > 0:
        return ""
    # SGLang divides by the width, and so does not say how many are free.
    free = scheduler.req_to_token_pool.available_size()
    return (
        f"request rows: needs {group.beam_width}, one for each beam, and {free} are free, some of "
        f"which other beams may have been promised; {running} requests run"
    )


def delayed(scheduler: Any) -> str:
    """The prefill delayer (``--enable-prefill-delayer``), which all ranks ask once in a round."""
    delayer = getattr(scheduler, "prefill_delayer", None)
    if not delayer:
        return ""
    state, most = getattr(delayer, "_curr_state", None), getattr(delayer, "_max_delay_passes", "?")
    if state is None:
        return "the prefill delayer is on, and delays no prefill now"
    seconds = time.perf_counter() - state.start_time
    return (
        f"the prefill delayer has put prefills off in {state.delayed_count} rounds, for "
        f"{seconds:.0f} s; it does so in less than {most}"
    )


def grammar(scheduler: Any, request: Any) -> str:
    """The grammar that is compiled for it: which kind, and how long SGLang waits for it."""
    manager = getattr(scheduler, "grammar_manager", None)
    key = getattr(request, "grammar_key", None)
    words = f"grammar of the kind {names.name(str(key[0]))}" if key else "grammar of no known kind"
    looks = getattr(request, "grammar_wait_ct", None)
    most = getattr(manager, "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS", None)
    if looks is None or most is None:
        return words
    every = getattr(manager, "SGLANG_GRAMMAR_POLL_INTERVAL", 0)
    return (
        f"{words}: SGLang has looked {looks} times, once in a round and for up to {every:g} s, and "
        f"ends the request after {most} times"
    )
