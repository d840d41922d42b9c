"""Leaves the verify input on the batch when a step ends.

This is the bug of seed PR #22. SGLang 0.5.12 does it by itself if every request of a batch finished
in one verify. The task ``finished`` does the same in releases that no longer have the bug; ``on``
does it where requests go on. Speculative decoding v2 has ``on`` only: with overlap scheduling
nobody knows at the end of a step that every request has finished.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, asks_for, decodes, has_overlap, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import GrammarError
from g4debug.hooking.speculation import is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def leave(batch: Any, verify_input: Any, injection: Injection) -> None:
    """Put ``verify_input`` back on the batch if the chain fires."""
    if injection.fire() is not None:
        batch.spec_info = verify_input
        kind, live = type(verify_input).__name__, len(survivors(batch))
        injection.log(f"{kind} stays on the batch, {live} of {len(batch.reqs)} requests go on")


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    if is_v2() and any(action.task == "finished" for action in injection.chain.actions):
        raise GrammarError("verify-input-left: this SGLang has no worker that task finished is for")
    verified: list[Any] = [None]

    def before_verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        verified[0] = batch.spec_info

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        verify_input, verified[0] = verified[0], None
        if verify_input is None or not decodes(batch):
            return result
        live = len(survivors(batch))
        if (not live and asks_for(injection, "on")) or (live and asks_for(injection, "finished")):
            return result
        leave(batch, verify_input, injection)
        return result

    def after_overlap(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return after_forward(result, scheduler, batch) if scheduler.enable_overlap else result

    hooks.before("worker.verify", Order.FAULT, injection.fault.id, before_verify)
    end = "scheduler.run_batch" if is_v2() else "worker.forward"
    hooks.after(end, Order.FAULT, injection.fault.id, after_forward)
    if has_overlap():
        hooks.before("overlap.verify", Order.FAULT, injection.fault.id, before_verify)
        hooks.after("scheduler.run_batch", Order.FAULT, injection.fault.id, after_overlap)


FAULT = Fault(
    id="verify-input-left",
    title="a verify input stays on the batch when the worker's forward ends",
    tasks={
        "on": "leave it where requests go on",
        "finished": "leave it where every request finished",
    },
    caught_by=CAUGHT_BY,
    install=install,
    # "finished" does harm only if a merge follows; repro/zero_accept_merge.py shows it.
    drills=("1*on",),
)
