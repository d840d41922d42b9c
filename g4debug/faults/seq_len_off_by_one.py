"""Changes the length of one request by one after a decode step.

The verify makes the new length, on the device. ``device`` changes what the next step gets from the
FutureMap, but not what the host gets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import (
    CAUGHT_BY,
    asks_for,
    changed,
    decodes,
    one_of,
    put,
    survivors,
)
from g4debug.faults.base import Fault, Injection

if TYPE_CHECKING:
    import torch

OFF = {"plus": 1, "minus": -1, "device": 1}


def install(injection: Injection) -> None:
    def shifted(lengths: torch.Tensor, batch: Any, where: str) -> torch.Tensor:
        rows = survivors(batch)
        action = injection.fire() if rows else None
        if action is None:
            return lengths
        (row, _, who), off = one_of(injection, batch, rows), OFF[action.task]
        injection.log(f"{who}: {where} {off:+d}")
        return changed(lengths, row, int(lengths[row]) + off)

    @put(injection.after, "verify")
    def after_verify(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.reqs and not asks_for(injection, "device"):
            result.new_seq_lens = shifted(result.new_seq_lens, batch, "the new seq_len")
        return result

    @injection.after("future.resolve_lens")
    def after_resolve(result: Any, future_map: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        if decodes(batch) and asks_for(injection, "device"):
            batch.seq_lens = shifted(batch.seq_lens, batch, "seq_len on the device")
        return result


FAULT = Fault(
    id="seq-len-off-by-one",
    title="the length of a request is wrong by one after a decode step",
    tasks={
        "plus": "it is one too long, on the host and on the device",
        "minus": "it is one too short, on the host and on the device",
        "device": "it is one too long, only on the device",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*plus", "1*minus"),
)
