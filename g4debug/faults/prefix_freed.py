"""Frees a full page of the prefix cache while a running request reads it.

SGLang locks what a running request reads. A node of the prefix cache that is given new pages, or
evicted, without a look at its lock frees them all the same (upstream #29352).
"""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if batch.forward_mode is None or not batch.forward_mode.is_decode():
            return
        allocator = scheduler.token_to_kv_pool_allocator
        for request in batch.reqs:
            row, tokens = req_kv.row(request), req_kv.protected(request) or 0
            if row < 0 or tokens < allocator.page_size or request.finished():
                continue
            if injection.fire(request=request.rid):
                page = batch.req_to_token_pool.req_to_token[row, : allocator.page_size]
                first = int(page[0])
                injection.log(
                    f"full page {first // allocator.page_size}, the first one of {request.rid}"
                )
                # From 0.5.21 on, free also frees the SWA page, which may be gone since long.
                getattr(allocator, "free_full", allocator.free)(page)


FAULT = Fault(
    id="prefix-freed",
    title="a page of the prefix cache is freed while a running request reads it",
    tasks={"on": "free the first full page of one request that decodes"},
    caught_by=("page-table", "pool-leak", "kv-allocator"),
    asks=("a prefix cache",),
    selectors=("request",),
)
