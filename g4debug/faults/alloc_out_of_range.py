"""Hands out a page far beyond the pool, as an allocator with a corrupted free list would."""

from __future__ import annotations

from functools import partial
from typing import Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

FAR = 10_000_000  # on a GPU the address must not fall into a neighbouring allocation


def install(injection: Injection) -> None:
    allocators = _allocator.Allocators(injection)

    def act(pool: str, allocator: Any) -> None:
        if _next(injection) == pool and injection.fire(mode=allocators.mode):
            page = FAR + injection.random.randrange(1000)
            lost = _allocator.corrupt_free_list(allocator, page)
            injection.log(f"{pool} pool hands out page {page} instead of {lost}")

    for pool in ("full", "swa"):
        allocators.before_page(pool)(partial(act, pool))


def _next(injection: Injection) -> str:
    """The pool of the chain's next action."""
    actions, index = injection.chain.actions, injection.chain.index
    return "swa" if index < len(actions) and actions[index].task == "swa" else "full"


FAULT = Fault(
    id="alloc-out-of-range",
    title="an allocator hands out a page beyond its pool",
    tasks={"on": "do it in the full pool", "swa": "do it in the SWA pool"},
    caught_by=("kv-allocator",),
    selectors=("mode",),
    drills=("1*on@mode=decode", "1*swa@mode=decode"),
)
