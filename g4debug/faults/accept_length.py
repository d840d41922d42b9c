"""Lets a verify report an impossible accept length for one request that goes on.

It changes the tensor that goes to the host, after the worker's step has used it.
"""

from __future__ import annotations

from typing import Any

from g4debug import speculation
from g4debug.faults._spec import CAUGHT_BY, changed, one_of, put, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action


def impossible(action: Action, worker: Any) -> int:
    """The accept length of the action's task."""
    return 0 if action.task == "zero" else int(worker.speculative_num_draft_tokens) + 1


def install(injection: Injection) -> None:
    @put(injection.after, "forward")
    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        verified = result.accept_lens is not None and (
            mode.is_target_verify() or not mode.is_extend()
        )
        known = speculation.of(batch) is not None and verified
        live = survivors(batch) if known else []
        action = injection.fire() if live else None
        if action is not None:
            row, _, who = one_of(injection, batch, live)
            length = impossible(action, worker)
            result.accept_lens = changed(result.accept_lens, row, length)
            injection.log(f"{who}: accept length {length}")
        return result


FAULT = Fault(
    id="accept-length",
    title="a verify reports an impossible accept length",
    tasks={
        "zero": "report 0: not even the bonus token was accepted",
        "too-long": "report one more than there are draft tokens",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*zero", "1*too-long"),
)
