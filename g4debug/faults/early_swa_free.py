"""Evicts a SWA page that the window still needs, as an eviction that goes too far would.

After ``_evict_swa`` has done its work for a request, the oldest page of the window is freed, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def around(
        call_next: Callable[..., Any], batch: Any, request: Any, pre_len: int, **kwargs: Any
    ) -> Any:
        result = call_next(batch, request, pre_len, **kwargs)
        size = int(batch.tree_cache.page_size)
        begin = max(0, pre_len - int(batch.tree_cache.sliding_window_size)) // size * size
        # Never the page into which the request writes next.
        if begin + size <= pre_len // size * size and injection.fire(request=request.rid):
            tokens = batch.req_to_token_pool.req_to_token[req_kv.row(request)]
            injection.log(
                f"tokens {begin}..{begin + size - 1} of {request.rid}, at length {pre_len}"
            )
            batch.token_to_kv_pool_allocator.free_swa(tokens[begin : begin + size])
        return result

    hooks.around("batch.evict_swa", Order.FAULT, injection.fault.id, around)


FAULT = Fault(
    id="early-swa-free",
    title="a SWA page is evicted inside its request's window",
    tasks={"on": "evict the oldest page of one request's window"},
    caught_by=("page-table", "swa-allocator"),
    install=install,
    selectors=("request",),
)
