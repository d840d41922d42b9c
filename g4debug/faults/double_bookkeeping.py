"""Counts the accepted tokens of a verify a second time, for one request that goes on.

This is the bug of seed PR #24: SGLang's v1 verify (``eagle_info.py``) advances
``kv_committed_len``, ``output_ids`` and ``spec_verify_ct``, and so does its v2 result processing
(``scheduler_output_processor_mixin.py``). If v2 processes the result of a v1 worker, both do it.
Where there is v2 only, what processes the result counts a second time.

v1's verify also sets ``kv_allocated_len`` to ``kv_committed_len``. v2 has allocated ahead, so the
pages between the two are then nobody's, and never freed. On 0.5.12's v2 task ``kv`` does that, too,
for a request that loses a page by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import (
    CAUGHT_BY,
    asks_for,
    decodes,
    has_overlap,
    survivors,
    verify_output,
)
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action
from g4debug.hooking import req_kv
from g4debug.hooking.speculation import is_frozen_kv_mtp, is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def count_again(request: Any, accepted: int, task: str) -> str:
    """Advance the fields of ``task`` again, as the v2 processing does. Returns it in words."""
    done = []
    if task in ("on", "kv"):
        req_kv.holder(request, "kv_committed_len").kv_committed_len += accepted
        done.append(f"kv_committed_len +{accepted}")
    if task in ("on", "output"):
        request.output_ids.extend(list(request.output_ids[-accepted:]))
        done.append(f"output_ids +{accepted}")
    if task in ("on", "verify-ct"):
        request.spec_verify_ct += 1
        done.append("spec_verify_ct +1")
    return ", ".join(done)


def loses_a_page(request: Any, accepted: int, page: int) -> bool:
    """True if pages lie between what v1 would leave allocated and what v2 has allocated."""
    left = req_kv.committed(request) + accepted
    return -(-left // page) < -(-req_kv.allocated(request) // page)


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def after_resolve(kept: Any, processor: Any, result: Any, batch: Any) -> Any:
        rows = survivors(batch)
        action = injection.fire() if rows else None
        if action is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            done = count_again(request, len(kept[row]), action.task)
            injection.log(f"request {request.rid} (row {row}): {done} a second time")
        return kept

    if is_v2():
        hooks.after("result.resolve", Order.FAULT, injection.fault.id, after_resolve)
        return

    def after_overlap(kept: Any, scheduler: Any, result: Any, batch: Any) -> Any:
        rows = survivors(batch) if is_frozen_kv_mtp(batch) else []
        page = scheduler.token_to_kv_pool_allocator.page_size
        as_v1 = asks_for(injection, "kv")
        if as_v1:
            rows = [i for i in rows if loses_a_page(batch.reqs[i], len(kept[i]), page)]
        action = injection.fire() if rows else None
        if action is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            done = count_again(request, len(kept[row]), action.task)
            if as_v1:
                was, request.kv_allocated_len = request.kv_allocated_len, request.kv_committed_len
                done += f", kv_allocated_len {was} -> {request.kv_allocated_len}"
            injection.log(f"request {request.rid} (row {row}): {done} a second time")
        return kept

    if has_overlap():
        hooks.after("result.resolve_overlap", Order.FAULT, injection.fault.id, after_overlap)
    accepted: list[list[int]] = [[]]

    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        accepted[0] = [n + 1 for n in verify_output(result).num_correct_drafts_per_req_cpu]
        return result

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch) if decodes(batch) else []
        action: Action | None = injection.fire() if rows and accepted[0] else None
        if action is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            done = count_again(request, accepted[0][row], action.task)
            injection.log(f"request {request.rid} (row {row}): {done} a second time")
        return result

    hooks.after("worker.verify", Order.FAULT, injection.fault.id, after_verify)
    hooks.after("worker.forward", Order.FAULT, injection.fault.id, after_forward)


FAULT = Fault(
    id="double-bookkeeping",
    title="the accepted tokens of a verify are counted twice",
    tasks={
        "on": "in kv_committed_len, output_ids and spec_verify_ct",
        "kv": "only in kv_committed_len",
        "output": "only in output_ids",
        "verify-ct": "only in spec_verify_ct",
    },
    caught_by=CAUGHT_BY,
    install=install,
    drills=("1*on", "1*kv", "1*output", "1*verify-ct"),
)
