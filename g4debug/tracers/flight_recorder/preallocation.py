"""Says why a decode server of disaggregation has no memory for a request that it is to receive.

The other server is ready for such a request. SGLang admits it by ``pop_preallocated`` of its queue
(``disaggregation/decode.py``), first come, first served, and waits without an end. Here its own
functions are asked for the same figures, in the same order; they only read. Read and run with
0.5.23; a release that has other functions is told as "not known".
"""

from __future__ import annotations

import sys
from typing import Any

from g4debug.tracers.flight_recorder import admission
from g4debug.tracers.flight_recorder.admission import FULL, NAMES, ROWS, SWA, Refusal
from g4debug.tracers.flight_recorder.work import name


def refusal(scheduler: Any, request: Any) -> Refusal:
    """The check that keeps a request without memory. Lengths and figures are in tokens."""
    queue = scheduler.disagg_decode_prealloc_queue
    first = next(entry.req for entry in queue.queue if entry.waiting_for_input)
    if first is not request:
        return Refusal(f"it waits behind {name(first)}: {refusal(scheduler, first).words}")
    if queue.req_to_metadata_buffer_idx_allocator.available_size() <= 0:
        return Refusal("buffers for what comes with the KV: needs 1, has 0")
    if queue.req_to_token_pool.available_size() <= 0:
        return Refusal("request rows: needs 1, has 0", ROWS, 1, 1)
    if not getattr(queue.tree_cache, "disable", True):
        return Refusal("not known: with a prefix cache, what it needs depends on a match")
    running = scheduler.running_batch.reqs
    retractable = sum(len(r.origin_input_ids) + len(r.output_ids) for r in running)
    clip = sys.modules[type(queue).__module__].CLIP_MAX_NEW_TOKEN
    new = min(request.sampling_params.max_new_tokens, clip)
    fill = queue._pre_alloc_fill_len(request)
    allocated = queue._required_alloc_tokens(fill_len=fill, prefix_len=0)
    needs = {FULL: queue._required_admission_tokens(request, allocated, 0, retractable)}
    if queue._uses_swa_reservation():
        tail = [queue._swa_retractable_len(r) for r in running]
        full, swa = queue._swa_aware_allocatable_token_budgets(retractable, sum(tail), True)
        has = {FULL: full, SWA: swa}
        needs[SWA] = needs[FULL]
        if queue._uses_swa_tail_prealloc():
            required = queue._prealloc_required_tokens(request)[1]
            window = queue._prealloc_kv_lens(request)[1]
            needs[SWA] = max(required, window + new - sum(tail))
    else:
        has = {FULL: queue._allocatable_token_budgets(retractable, True)}
    for pool, left in has.items():
        if needs[pool] > left:
            # What running requests hold is taken off the need, so that it is no least one then.
            most = -1 if running else admission.size(scheduler, pool)
            return Refusal(
                f"{NAMES[pool]}: needs {needs[pool]} to receive {fill} tokens, because SGLang also "
                f"counts what it may generate ({new}), has {max(left, 0)}",
                pool,
                needs[pool] - left,
                needs[pool],
                most,
            )
    figures = ", ".join(f"{needs[p]} of the {NAMES[p]}, where {has[p]} are left" for p in has)
    return Refusal(f"not known: it needs {figures}")
