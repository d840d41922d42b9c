"""Lets the full-to-SWA mapping of a live page name another page of the SWA pool.

Nothing crashes: sliding layers read and write somebody else's KV. It takes effect when the mapping
is read next: when the sequence goes on, when its page table is built, or when the page is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    allocators = _allocator.Allocators(injection)

    @allocators.around_callers(*_allocator.ALLOC)
    def around(call_next: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        out = call_next(allocator, *args, **kwargs)
        if out is None or not hasattr(allocator, "swa_attn_allocator") or not out.numel():
            return out
        if injection.fire(mode=allocators.mode):
            size = allocator.page_size
            page = int(out[-1]) // size
            mapping = allocator.full_to_swa_index_mapping
            cells = mapping[page * size : (page + 1) * size]
            right = int(mapping[out[-1]]) // size
            wrong = right % (allocator.size_swa // size) + 1
            cells[cells > 0] += (wrong - right) * size
            injection.log(f"full page {page} maps to SWA page {wrong} instead of {right}")
        return out


FAULT = Fault(
    id="swa-mapping-corrupt",
    title="a live page's full-to-SWA mapping names another SWA page",
    tasks={"on": "corrupt the newest page of one request"},
    caught_by=("page-table", "kv-allocator"),
    asks=("a SWA pool",),
    selectors=("mode",),
    drills=("1*on@mode=decode",),
)
