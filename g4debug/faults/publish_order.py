"""Publishes the new lengths at the wrong time: before the verify, twice, or never.

With speculative decoding v2 and overlap scheduling the scheduler begins to prepare the next step as
soon as they are published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults._spec import CAUGHT_BY, decodes, put, survivors
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @put(injection.around, "forward")
    def around_forward(
        call_next: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        publish = kwargs.get("on_publish")
        due = publish is not None and decodes(batch) and survivors(batch)
        action = injection.fire() if due else None
        if publish is None or action is None:
            return call_next(worker, batch, *args, **kwargs)
        injection.log(f"{action.task}: {len(batch.reqs)} requests")
        if action.task == "early":
            publish(batch.seq_lens)
        if action.task != "twice":
            kwargs["on_publish"] = lambda lengths: None
        result = call_next(worker, batch, *args, **kwargs)
        if action.task == "twice":
            publish(result.new_seq_lens)
        return result


FAULT = Fault(
    id="publish-order",
    title="the new lengths are published before the verify, twice, or never",
    tasks={
        "early": "the lengths of before the verify are published, before it",
        "twice": "they are published once more at the end of the step",
        "never": "they are not published",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*early", "1*twice", "1*never"),
    needs=("future.publish",),
)
