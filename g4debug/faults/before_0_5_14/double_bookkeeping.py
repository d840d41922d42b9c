"""double-bookkeeping: SGLang's v1 verify and its v2 result processing both count.

That is the bug of seed PR #24: the v1 verify (``eagle_info.py``) advances ``kv_committed_len``,
``output_ids`` and ``spec_verify_ct``, and so does the v2 result processing
(``scheduler_output_processor_mixin.py``). If v2 processes the result of a v1 worker, both do it.

v1's verify also sets ``kv_allocated_len`` to ``kv_committed_len``. v2 has allocated ahead, so the
pages between the two are then nobody's, and never freed. On 0.5.12's v2 task ``kv`` does that, too,
for a request that loses a page by it.
"""

from __future__ import annotations

from typing import Any

from g4debug import speculation
from g4debug.faults._spec import asks_for, decodes, one_of, survivors
from g4debug.faults.base import Injection
from g4debug.faults.before_0_5_14._spec import verify_output
from g4debug.faults.double_bookkeeping import count_again
from g4debug.hooking import req_kv


def loses_a_page(request: Any, accepted: int, page: int) -> bool:
    """True if pages lie between what v1 would leave allocated and what v2 has allocated."""
    left = req_kv.committed(request) + accepted
    return -(-left // page) < -(-req_kv.allocated(request) // page)


def install(injection: Injection) -> None:
    @injection.after("result.resolve_overlap", optional=True)
    def after_overlap(kept: Any, scheduler: Any, result: Any, batch: Any) -> Any:
        rows = survivors(batch) if speculation.of(batch) is not None else []
        page = scheduler.token_to_kv_pool_allocator.page_size
        as_v1 = asks_for(injection, "kv")
        if as_v1:
            rows = [i for i in rows if loses_a_page(batch.reqs[i], len(kept[i]), page)]
        action = injection.fire() if rows else None
        if action is not None:
            row, request, who = one_of(injection, batch, rows)
            done = count_again(request, len(kept[row]), action.task)
            if as_v1:
                was, request.kv_allocated_len = request.kv_allocated_len, request.kv_committed_len
                done += f", kv_allocated_len {was} -> {request.kv_allocated_len}"
            injection.log(f"{who}: {done} a second time")
        return kept

    accepted: list[list[int]] = [[]]

    @injection.after("worker.verify")
    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        accepted[0] = [n + 1 for n in verify_output(result).num_correct_drafts_per_req_cpu]
        return result

    @injection.after("worker.forward")
    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch) if decodes(batch) else []
        action = injection.fire() if rows and accepted[0] else None
        if action is not None:
            row, request, who = one_of(injection, batch, rows)
            done = count_again(request, accepted[0][row], action.task)
            injection.log(f"{who}: {done} a second time")
        return result
