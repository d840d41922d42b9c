"""Leaves the verify input on the batch when a step ends.

This is the bug of seed PR #22. SGLang 0.5.12 does it by itself if every request of a batch finished
in one verify. ``on`` does it where requests go on. The task ``finished`` does it where every
request finished, before 0.5.14 only: with overlap scheduling nobody knows at the end of a step that
every request has finished.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, after_step, asks_for, decodes, put, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import GrammarError


def leave(batch: Any, verify_input: Any, injection: Injection) -> None:
    """Put ``verify_input`` back on the batch if the chain fires."""
    if injection.fire() is not None:
        batch.spec_info = verify_input
        kind, live = type(verify_input).__name__, len(survivors(batch))
        injection.log(f"{kind} stays on the batch, {live} of {len(batch.reqs)} requests go on")


def install(injection: Injection) -> None:
    if any(action.task == "finished" for action in injection.chain.actions):
        raise GrammarError("verify-input-left: this SGLang has no worker that task finished is for")
    at_end(injection)


def at_end(injection: Injection) -> None:
    """Leave it at the end of a step that suits the task."""
    verified: list[Any] = [None]

    @put(injection.before, "verify")
    def before_verify(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        verified[0] = batch.spec_info

    def act(batch: Any) -> None:
        verify_input, verified[0] = verified[0], None
        if verify_input is None or not decodes(batch):
            return
        if not asks_for(injection, "finished" if survivors(batch) else "on"):
            leave(batch, verify_input, injection)

    after_step(injection, act)


FAULT = Fault(
    id="verify-input-left",
    title="a verify input stays on the batch when the worker's forward ends",
    tasks={
        "on": "leave it where requests go on",
        "finished": "leave it where every request finished",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft model",),
    # "finished" does harm only if a merge follows; repro/zero_accept_merge.py shows it.
    drills=("1*on",),
)
