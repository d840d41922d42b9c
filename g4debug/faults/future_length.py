"""Changes a length in SGLang's FutureMap, between the step that publishes it and its next reader.

What the step published was right, and what the next one reads is not.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, decodes, one_of, survivors
from g4debug.faults.base import Fault, Injection

OFF = {"plus": 1, "minus": -1}


def install(injection: Injection) -> None:
    @injection.before("future.resolve_lens")
    def before_resolve(future_map: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        rows = survivors(batch) if decodes(batch) else []
        action = injection.fire() if rows else None
        if action is None:
            return
        (row, _, who), off = one_of(injection, batch, rows), OFF[action.task]
        if future_map.publish_ready is not None:
            future_map.publish_ready.wait()  # on a GPU the length is published on another stream
        at = batch.spec_info.future_indices[row]
        future_map.new_seq_lens_buf[at] += off
        injection.log(f"{who}: the length in row {int(at)} of the FutureMap {off:+d}")


FAULT = Fault(
    id="future-length",
    title="a published length changes before the next step reads it",
    tasks={"plus": "it is one too long", "minus": "it is one too short"},
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*plus", "1*minus"),
    needs=("future.resolve_lens",),
)
