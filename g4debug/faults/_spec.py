"""What the faults of speculative decoding share: a decode step of FROZEN_KV_MTP's v1 worker ends.

In the order of hooks the faults come after the fixes and before the tracers, so a fix inside the
worker's forward does not undo them. Only a step in which a request goes on is an opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Injection
from g4debug.faults.grammar import Action

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

CAUGHT_BY = ("spec-lifecycle",)
AtEnd = Callable[[Any, list[int], Action], None]  # batch, rows of requests that go on, action


def at_end_of_decode(hooks: Hooks, injection: Injection, act: AtEnd) -> None:
    """Call ``act`` after ``forward_batch_generation`` of a decode step if the chain fires."""
    from g4debug.hooking.hooks import Order

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch)
        action = injection.fire() if rows and decodes(batch) else None
        if action is not None:
            act(batch, rows, action)
        return result

    hooks.after("worker.forward", Order.FAULT, injection.fault.id, after_forward)


def asks_for(injection: Injection, task: str) -> bool:
    """True if the next action of the chain is ``task``.

    An opportunity that does not suit a task must not use it up.
    """
    chain = injection.chain
    return chain.index < len(chain.actions) and chain.actions[chain.index].task == task


def survivors(batch: Any) -> list[int]:
    """The rows of a ScheduleBatch whose requests go on."""
    return [i for i, r in enumerate(batch.reqs) if not r.finished()]


def decodes(batch: Any) -> bool:
    mode = batch.forward_mode
    return not (mode.is_idle() or mode.is_extend() or batch.is_extend_in_batch)


def verify_output(result: Any) -> Any:
    """The EagleVerifyOutput in what ``verify`` returns. From 0.5.13 on nothing else is returned."""
    return result if hasattr(result, "draft_extend_input") else result[1]
