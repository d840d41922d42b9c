"""Evicts a SWA page that the window still needs, as an eviction that goes too far would.

When SGLang has evicted what a request has left behind (``_evict_swa``), the oldest page of the
request's window is freed, too. From 0.5.14 on SGLang evicts only once in a while (each 128 steps,
or 128 tokens). There this is done where it decides about it, in each decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv

UNDER_WAY = 32  # tokens that two steps may add to a request before the host knows of them


def install(injection: Injection) -> None:
    evicted: list[Any] = []  # requests for which SGLang itself evicts in this step

    def evict(batch: Any, request: Any, pre_len: int, longest: int) -> None:
        """``pre_len``, ``longest``: how long the request is, and may be when the step runs."""
        size, window = int(batch.tree_cache.page_size), int(batch.tree_cache.sliding_window_size)
        begin = max(0, pre_len - window) // size * size
        # Never a page that has left the window by then, nor the one that is written next.
        usable = longest - window < begin + size <= pre_len // size * size
        if usable and injection.fire(request=request.rid):
            tokens = batch.req_to_token_pool.req_to_token[req_kv.row(request)]
            injection.log(
                f"tokens {begin}..{begin + size - 1} of {request.rid}, at length {pre_len}"
            )
            batch.token_to_kv_pool_allocator.free_swa(tokens[begin : begin + size])

    @injection.around("batch.evict_swa")
    def around(
        call_next: Callable[..., Any], batch: Any, request: Any, pre_len: int, **kwargs: Any
    ) -> Any:
        result = call_next(batch, request, pre_len, **kwargs)
        evicted.append(request)
        evict(batch, request, pre_len, pre_len)
        return result

    @injection.after("batch.maybe_evict_swa", optional=True)
    def after(result: Any, batch: Any) -> Any:
        others = [r for r in batch.reqs if not any(r is e for e in evicted)]
        evicted.clear()
        if batch.forward_mode.is_decode() and batch.tree_cache.supports_swa():
            for request in others:
                # Before a request's second decode step, its prefill may still run.
                if request.decode_batch_idx >= 1 and req_kv.row(request) >= 0:
                    length = request.seqlen - 1
                    room = req_kv.allocated(request)
                    evict(batch, request, length, min(room, length + UNDER_WAY))
        return result


FAULT = Fault(
    id="early-swa-free",
    title="a SWA page is evicted inside its request's window",
    tasks={"on": "evict the oldest page of one request's window"},
    caught_by=("page-table", "kv-allocator"),
    asks=("a SWA pool",),
    selectors=("request",),
)
