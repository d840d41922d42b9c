"""Has no page left, all of a sudden. Stress: SGLang must say so, in its own words.

Its callers check for room first, so that what they do about None is rarely seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults import _allocator
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    allocators = _allocator.Allocators(hooks, injection)

    def around(call_next: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
        if injection.fire(mode=allocators.mode):
            injection.log(f"no room in {allocators.mode or 'an allocation'}")
            return None
        return call_next(allocator, *args, **kwargs)

    for method in _allocator.ALLOC:
        allocators.around_callers(method, around)


FAULT = Fault(
    id="alloc-exhausted",
    title="an allocation finds no room",
    tasks={"on": "refuse one allocation"},
    caught_by=("flight-recorder",),  # of SGLang's own error; no other tracer has a say
    install=install,
    selectors=("mode",),
    drills=("1*on@mode=decode",),
)
