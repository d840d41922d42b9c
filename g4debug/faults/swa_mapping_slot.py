"""Changes one slot of the full-to-SWA mapping in the middle of a page, right before it is written.

A page's first slot, by which pages are mapped to pages, stays in its SWA page. The slot is one that
this verify writes, or the next one: with overlap scheduling the host does not know yet how long a
request is.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import asks_for, is_decode, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.row_foreign_page import running
from g4debug.hooking import req_kv

AHEAD = 3  # tokens of a verify behind its first one, with the 4 that Gemma-4's servers here use


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        allocator = batch.token_to_kv_pool_allocator
        mapping = getattr(allocator, "full_to_swa_index_mapping", None)
        if mapping is None or not is_decode(batch):
            return
        ahead = AHEAD + (batch.seq_lens_cpu is None)
        table = batch.req_to_token_pool.req_to_token
        known, slots = running(batch), {}
        for row in survivors(batch):
            request, at = known[row][0], known[row][1] + ahead
            slot = int(table[req_kv.row(request), at]) if at < req_kv.allocated(request) else 0
            if slot % allocator.page_size and int(mapping[slot]) > 0:
                slots[request.rid] = slot
        if not slots or (asks_for(injection, "other") and len(slots) < 2):
            return
        action = injection.fire()
        if action is None:
            return
        victim, other = (injection.random.sample(list(slots), len(slots)) * 2)[:2]
        slot, size = slots[victim], allocator.page_size
        right, begin, wrong = int(mapping[slot]), slot // size * size, 0
        if action.task == "other":
            wrong = int(mapping[slots[other]])
        elif action.task != "zero":
            wrong = _next(right, size)
        if action.task == "page":
            for one in range(begin, begin + size):
                if mapping[one] > 0:  # the others are not in use yet
                    mapping[one] = _next(right // size * size + one - begin, size)
        mapping[slot] = wrong
        injection.log(
            f"{action.task}: full slot {slot} of {victim} maps to SWA slot {wrong} "
            f"instead of {right}"
        )


def _next(slot: int, size: int) -> int:
    """The next slot of the same page; its first one comes after the last."""
    return slot // size * size + (slot + 1) % size


FAULT = Fault(
    id="swa-mapping-slot",
    title="a slot of the full-to-SWA mapping is wrong, in the middle of a page",
    tasks={
        "other": "it is the SWA slot of another request",
        "zero": "it is slot 0, as if it were evicted",
        "shift": "it is the next slot of its own SWA page",
        "page": "each slot of its page is the next one of the SWA page",
    },
    caught_by=("kv-writes",),
    asks=("a SWA pool",),
    drills=("1*other", "1*zero", "1*shift", "1*page"),
    # v1's verify takes the slots by itself, and writes them at once.
    needs=("future.resolve_lens",),
)
