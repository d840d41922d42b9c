"""Hands out a page that somebody still holds, as happens after a free that came too early."""

from __future__ import annotations

from typing import Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    import torch

    allocators = _allocator.Allocators(injection)

    @allocators.before_page("full")
    def act(allocator: Any) -> None:
        held = _held(allocator)
        if held and injection.fire(mode=allocators.mode):
            page = injection.random.choice(held)
            first = torch.full_like(allocator.free_pages[:1], page)
            allocator.free_pages = torch.cat((first, allocator.free_pages))
            injection.log(f"full pool hands out page {page}, which somebody holds")


def _held(allocator: Any) -> list[int]:
    """Every page that is not free. It goes through the whole pool: a fault may be slow."""
    free = set(_allocator.free_list(allocator).tolist())
    return [p for p in range(1, allocator.size // allocator.page_size + 1) if p not in free]


FAULT = Fault(
    id="alloc-double",
    title="an allocator hands out a page that somebody holds",
    tasks={"on": "do it in the full pool"},
    caught_by=("kv-allocator",),
    selectors=("mode",),
)
