"""Leaves the draft input that the verify made, as if the draft extend had not run.

Before 0.5.14 it leaves the draft-extend input on the batch, as if the seed step had not run.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, put, survivors
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @put(injection.around, "draft_extend")
    def around_extend(
        call_next: Any, worker: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
    ) -> None:
        was = result.next_draft_input
        call_next(worker, batch, result, *args, **kwargs)
        rows = survivors(batch)
        if rows and injection.fire() is not None:
            new = result.next_draft_input
            # A draft with KV of its own fills what the verify made, and ran on another object.
            result.next_draft_input = was = batch.spec_info if new is was else was
            kinds = f"{type(was).__name__} in place of {type(new).__name__}"
            injection.log(f"{kinds}, {len(rows)} requests")


FAULT = Fault(
    id="spec-info-wrong-type",
    title="a draft-extend input is on the batch where a draft input belongs",
    tasks={"on": "put the draft-extend input there"},
    caught_by=CAUGHT_BY,
    asks=("a draft model",),
)
