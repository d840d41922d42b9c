"""What the faults of speculative decoding share: a decode step of FROZEN_KV_MTP ends.

With the v1 worker (to SGLang 0.5.13) that is the end of the worker's forward. With v2 the scheduler
puts the next draft input on the batch after it, so there it is the end of ``run_batch``. 0.5.12 has
both: v1's worker, and v2 where the path frozen-kv-mtp-v2 is in force (``OVERLAP``).

In the order of hooks the faults come after the fixes and before the tracers, so a fix inside the
worker's forward does not undo them. Only a step in which a request goes on is an opportunity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Injection
from g4debug.faults.grammar import Action
from g4debug.hooking import targets
from g4debug.hooking.speculation import is_frozen_kv_mtp, is_v2

if TYPE_CHECKING:
    import torch

    from g4debug.hooking.hooks import Hooks

CAUGHT_BY = ("spec-lifecycle",)
# Sites of 0.5.12's v2. With v1's worker nothing of FROZEN_KV_MTP passes them.
OVERLAP = ("overlap.forward", "overlap.verify", "result.resolve_overlap")
UNSEEN = 8  # tokens of two verifies, with the 4 draft tokens that Gemma-4's servers here use
AtEnd = Callable[[Any, list[int], Action], None]  # batch, rows of requests that go on, action


def at_end_of_decode(hooks: Hooks, injection: Injection, act: AtEnd) -> None:
    """Call ``act`` at the end of a decode step if the chain fires."""
    from g4debug.hooking.hooks import Order

    def at_end(result: Any, owner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch)
        action = injection.fire() if rows and decodes(batch) else None
        if action is not None:
            act(batch, rows, action)
        return result

    def at_end_of_overlapped(result: Any, scheduler: Any, batch: Any, *a: Any, **k: Any) -> Any:
        return at_end(result, scheduler, batch) if scheduler.enable_overlap else result

    if is_v2():
        hooks.after("scheduler.run_batch", Order.FAULT, injection.fault.id, at_end)
        return
    hooks.after("worker.forward", Order.FAULT, injection.fault.id, at_end)
    if has_overlap():
        hooks.after("scheduler.run_batch", Order.FAULT, injection.fault.id, at_end_of_overlapped)


def has_overlap() -> bool:
    """True on 0.5.12, which has a v2 beside v1's worker."""
    return all(targets.path(site) is not None for site in OVERLAP)


def asks_for(injection: Injection, task: str) -> bool:
    """True if the next action of the chain is ``task``.

    An opportunity that does not suit a task must not use it up.
    """
    chain = injection.chain
    return chain.index < len(chain.actions) and chain.actions[chain.index].task == task


def survivors(batch: Any) -> list[int]:
    """The rows of a ScheduleBatch whose requests go on.

    With overlap scheduling up to two verifies are under way whose results SGLang has not seen yet,
    and a request that ends in them is in the next batch all the same. Whatever strikes it there,
    nobody minds. So a request must have more tokens left than those verifies can give it.
    """
    live = [i for i, r in enumerate(batch.reqs) if not (r.finished() or r.is_retracted)]
    # A batch that a worker is given does not say; SGLang gives v1's worker another kind.
    ahead = is_v2() or getattr(batch, "enable_overlap", True)
    return [i for i in live if _left(batch.reqs[i]) > UNSEEN] if ahead else live


def _left(request: Any) -> int:
    """How many tokens a request may still get, by what SGLang has seen."""
    return int(request.sampling_params.max_new_tokens) - len(request.output_ids)


def decodes(batch: Any) -> bool:
    """True for a decode of FROZEN_KV_MTP. Other servers and steps are no opportunities."""
    mode = batch.forward_mode
    idle = mode.is_idle() or mode.is_extend() or batch.is_extend_in_batch
    return not idle and is_frozen_kv_mtp(batch)


def changed(numbers: torch.Tensor, row: int, value: int) -> torch.Tensor:
    """A copy of an integer tensor [requests] with another number in one row."""
    copy = numbers.clone()
    copy[row] = value
    return copy


def verify_output(result: Any) -> Any:
    """The EagleVerifyOutput in what the v1 ``verify`` returns; from 0.5.13 on, that is it."""
    return result if hasattr(result, "draft_extend_input") else result[1]
