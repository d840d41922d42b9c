"""Lets an allocation find no page. This is a stress test: SGLang itself must report it.

SGLang's callers ask for room first, so it is rarely seen what they do when an allocation fails.
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
        if injection.fire(mode=allocators.mode):
            injection.log(f"an allocation finds no room, in mode {allocators.mode or 'unknown'}")
            return None
        return call_next(allocator, *args, **kwargs)


FAULT = Fault(
    id="alloc-exhausted",
    title="an allocation finds no room",
    tasks={"on": "let one allocation fail"},
    caught_by=("flight-recorder",),  # it saves the steps before SGLang's own error
    selectors=("mode",),
    drills=("1*on@mode=decode",),
)
