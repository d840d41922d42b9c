"""Frees a page that was never handed out, as a stale or corrupted index would."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    import torch

    allocators = _allocator.Allocators(injection)
    own = False

    @allocators.around_frees
    def around(
        call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        nonlocal own
        result = call_next(allocator, free_index, **kwargs)
        full = _allocator.part(allocator, "full")
        # The lowest pages are handed out first, so the highest free page was never handed out.
        if not own and len(full.free_pages) and injection.fire(mode=allocators.mode):
            page = int(full.free_pages.max())
            injection.log(f"page {page}")
            size = allocator.page_size
            own = True
            try:
                allocator.free(
                    torch.arange(page * size, (page + 1) * size, device=free_index.device)
                )
            finally:
                own = False
        return result


FAULT = Fault(
    id="free-unallocated",
    title="a page that was never handed out is freed",
    tasks={"on": "free the highest free page"},
    caught_by=("kv-allocator",),
    selectors=("mode",),
)
