"""Tells the scheduler that the KV pools are full. This is a stress test: it must retract and go on.

``check_decode_mem`` is asked once before each decode, and then gives the wrong answer.
``retract_decode`` asks it again about the requests that would stay, and gets the true answer. While
a request of the batch is about to end, 0.5.23 waits for its pages instead: it skips one decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @injection.around("batch.check_decode_mem")
    def around(
        call_next: Callable[..., bool], batch: Any, selected_indices: list[int] | None = None
    ) -> bool:
        enough = call_next(batch, selected_indices)
        if (
            not enough
            or selected_indices is not None
            or len(batch.reqs) < 2
            or injection.fire() is None
        ):
            return enough
        injection.log(f"{len(batch.reqs)} requests were running")
        return False


FAULT = Fault(
    id="forced-retract",
    title="the scheduler is told that the KV pools are full",
    tasks={"on": "say so once"},
    caught_by=(),
    drills=("3*on",),
)
