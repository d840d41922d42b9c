"""Frees pages twice, as happens if two owners both free the pages of one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    allocators = _allocator.Allocators(injection)
    again = False

    @allocators.around_frees
    def around(
        call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        nonlocal again
        fires = not again and injection.fire(mode=allocators.mode)
        tokens = free_index.clone() if fires else free_index
        result = call_next(allocator, free_index, **kwargs)
        if fires:
            injection.log(_allocator.named(_allocator.pages(tokens, allocator.page_size)))
            again = True
            try:
                # From 0.5.21 on a free takes the SWA pages out of the mapping; who frees such
                # tokens again has to use free_full.
                getattr(allocator, "free_full", allocator.free)(tokens)
            finally:
                again = False
        return result


FAULT = Fault(
    id="double-free",
    title="pages are freed twice",
    tasks={"on": "repeat one free"},
    caught_by=("kv-allocator",),
    selectors=("mode",),
)
