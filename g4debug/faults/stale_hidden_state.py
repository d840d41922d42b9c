"""Gives the assistant the hidden states of the step before.

With ``on`` the seed step gets them, in place of those of this step's verify. With ``draft`` the
next draft gets them, in place of those that the seed step left in the draft input. Speculative
decoding v2 has no seed step of its own: there ``on`` means what is stashed for the next step, and
``draft`` what the draft finds in its input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, asks_for, decodes, has_overlap, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking.speculation import is_v2

if TYPE_CHECKING:
    import torch

    from g4debug.hooking.hooks import Hooks


class _Old:
    """Keeps the hidden states of the step before, for one of the two places."""

    def __init__(self, injection: Injection, task: str) -> None:
        self.injection = injection
        self.task = task
        self.other = "draft" if task == "on" else "on"
        self.kept: torch.Tensor | None = None

    def swap(self, spec: Any) -> None:
        """Keep this step's hidden states, and put the last step's in their place if it fires."""
        fresh, old = spec.hidden_states, self.kept
        if fresh is None:
            return
        self.kept = fresh.clone()
        if old is None or not old.shape[0] or asks_for(self.injection, self.other):
            return
        if self.injection.fire() is None:
            return
        # Take as many rows as are needed. It does not matter to which request a row belonged.
        rows = [i % old.shape[0] for i in range(fresh.shape[0])]
        spec.hidden_states = old[rows]
        self.injection.log(f"{self.task}: hidden states of the step before, {len(rows)} rows")


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    seed, draft = _Old(injection, "on"), _Old(injection, "draft")

    def before_draft_extend(worker: Any, batch: Any, result: Any) -> None:
        if survivors(batch):
            seed.swap(result.logits_output)

    def before_forward(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if decodes(batch) and survivors(batch):
            draft.swap(batch.spec_info)

    if is_v2():
        hooks.before("worker.draft_extend", Order.FAULT, injection.fault.id, before_draft_extend)
        hooks.before("worker.forward", Order.FAULT, injection.fault.id, before_forward)
        return

    if has_overlap():  # what only the seed step gets is inside the draft there
        hooks.before("overlap.forward", Order.FAULT, injection.fault.id, before_forward)

    def before_extend(worker: Any, batch: Any) -> None:
        if decodes(batch) and survivors(batch):
            seed.swap(batch.spec_info)

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if decodes(batch) and survivors(batch):
            draft.swap(batch.spec_info)
        return result

    hooks.before("worker.extend_after_decode", Order.FAULT, injection.fault.id, before_extend)
    hooks.after("worker.forward", Order.FAULT, injection.fault.id, after_forward)


FAULT = Fault(
    id="stale-hidden-state",
    title="the assistant gets the hidden states of the step before",
    tasks={
        "on": "the seed step gets them",
        "draft": "the next draft gets them",
    },
    caught_by=CAUGHT_BY,
    install=install,
    drills=("1*on", "1*draft"),
)
