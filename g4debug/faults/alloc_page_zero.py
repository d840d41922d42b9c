"""Hands out page 0, which is reserved for the writes of padding."""

from __future__ import annotations

from typing import Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    allocators = _allocator.Allocators(injection)

    @allocators.before_page("full")
    def act(allocator: Any) -> None:
        if injection.fire(mode=allocators.mode):
            lost = _allocator.corrupt_free_list(allocator, 0)
            injection.log(f"full pool hands out page 0 instead of {lost}")


FAULT = Fault(
    id="alloc-page-zero",
    title="an allocator hands out the reserved page 0",
    tasks={"on": "do it in the full pool"},
    caught_by=("kv-allocator",),
    selectors=("mode",),
)
