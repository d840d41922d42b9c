"""Mixes up the rows by which a step of speculative decoding v2 hands over to the next one.

SGLang's FutureMap has a row for each row of ``req_to_token``. ``publish``, ``stash`` and ``read``
exchange the rows of two requests when they are written or read. ``lost`` leaves the stash out, so
that the next step gathers what the step before had left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, asks_for, decodes, put, survivors
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch


def exchanged(injection: Injection, indices: torch.Tensor, batch: Any, task: str) -> torch.Tensor:
    """``indices`` with two entries exchanged if the chain fires."""
    rows = survivors(batch)
    if len(rows) < 2 or not asks_for(injection, task) or injection.fire() is None:
        return indices
    a, b = injection.random.sample(rows, 2)
    order = list(range(indices.shape[0]))
    order[a], order[b] = b, a
    rids = f"requests {batch.reqs[a].rid} and {batch.reqs[b].rid} (rows {a} and {b})"
    injection.log(f"{task}: {rids} exchanged")
    return indices[order]


def install(injection: Injection) -> None:
    verifying: list[Any] = [None]  # the batch that is being verified

    @put(injection.around, "forward")
    def around_forward(
        call_next: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        publish = kwargs.get("on_publish")
        decode = decodes(batch)
        verifying[0] = batch if decode else None
        if decode and publish is not None:
            indices = exchanged(injection, publish.args[0], batch, "publish")
            kwargs["on_publish"] = functools.partial(publish.func, indices)
            if indices is publish.args[0]:
                kwargs["on_publish"] = publish
        return call_next(worker, batch, *args, **kwargs)

    @injection.around("scheduler.relay")
    def around_relay(call_next: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        batch, verifying[0] = verifying[0], None
        if batch is None:
            return call_next(scheduler, *args)
        if survivors(batch) and asks_for(injection, "lost") and injection.fire() is not None:
            injection.log(f"lost: nothing is stashed for {len(batch.reqs)} requests")
            return None
        return call_next(
            scheduler,
            *(exchanged(injection, a, batch, "stash") if hasattr(a, "clone") else a for a in args),
        )

    @injection.before("future.resolve_lens")
    def before_resolve(future_map: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        if decodes(batch):
            spec = batch.spec_info
            spec.future_indices = exchanged(injection, spec.future_indices, batch, "read")


FAULT = Fault(
    id="future-row",
    title="a step hands over to the next one in the wrong rows, or not at all",
    tasks={
        "publish": "the new lengths of two requests are published in each other's row",
        "stash": "bonus token and hidden state of two requests are stashed in each other's row",
        "read": "two requests read each other's row",
        "lost": "bonus tokens and hidden states are not stashed",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*publish", "1*stash", "1*read", "1*lost"),
    needs=("future.resolve_lens", "scheduler.relay"),
)
