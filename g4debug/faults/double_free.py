"""Frees pages twice, as happens if two owners both free the pages of one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    allocators = _allocator.Allocators(hooks, injection)
    again = False

    def around(call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor) -> Any:
        nonlocal again
        result = call_next(allocator, free_index)
        real = free_index.numel() and allocator.is_not_in_free_group and not again
        if real and injection.fire(mode=allocators.mode):
            injection.log(_allocator.named(_allocator.pages(free_index, allocator.page_size)))
            again = True
            try:
                allocator.free(free_index)
            finally:
                again = False
        return result

    allocators.around_callers("free", around)


FAULT = Fault(
    id="double-free",
    title="pages are freed twice",
    tasks={"on": "repeat one free"},
    caught_by=("swa-allocator",),
    install=install,
    selectors=("mode",),
)
