"""Loses a free on its way to the allocator: the pages belong to nobody and are not free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def install(injection: Injection) -> None:
    allocators = _allocator.Allocators(injection)

    @allocators.around_frees
    def around(
        call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        if injection.fire(mode=allocators.mode):
            injection.log(_allocator.named(_allocator.pages(free_index, allocator.page_size)))
            return None
        return call_next(allocator, free_index, **kwargs)


FAULT = Fault(
    id="lost-free",
    title="a free never reaches the allocator",
    tasks={"on": "lose one free"},
    caught_by=("pool-leak",),
    watched="pool-leak",
    selectors=("mode",),
)
