"""Gives the assistant the hidden states of the step before.

With ``on`` they are stashed for the next step, in place of the hidden states of this step's verify.
With ``draft`` the next draft finds them in its input. Before 0.5.14 the seed step gets them with
``on``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, asks_for, decodes, put, survivors
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


class Old:
    """Keeps the hidden states of the step before, for one of the two places."""

    def __init__(self, injection: Injection, task: str) -> None:
        self.injection = injection
        self.task = task
        self.other = "draft" if task == "on" else "on"
        self.kept: torch.Tensor | None = None

    def swap(self, spec: Any) -> None:
        """Keep this step's hidden states, and put the last step's in their place if it fires."""
        fresh, old = getattr(spec, "hidden_states", None), self.kept
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

    def see(self, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if decodes(batch) and survivors(batch):
            self.swap(batch.spec_info)


def install(injection: Injection) -> None:
    seed, draft = Old(injection, "on"), Old(injection, "draft")

    @put(injection.before, "draft_extend")
    def before_draft_extend(
        worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> None:
        if survivors(batch):
            seed.swap(result.logits_output)

    put(injection.before, "forward")(draft.see)


FAULT = Fault(
    id="stale-hidden-state",
    title="the assistant gets the hidden states of the step before",
    tasks={
        "on": "the seed step gets them",
        "draft": "the next draft gets them",
    },
    caught_by=CAUGHT_BY,
    asks=("hidden states that a draft begins with",),
    drills=("1*on", "1*draft"),
)
