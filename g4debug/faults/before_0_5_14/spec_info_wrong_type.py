"""spec-info-wrong-type: the draft-extend input stays on the batch, as if no seed step had run."""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import at_end_of_decode
from g4debug.faults.base import Injection
from g4debug.faults.before_0_5_14._spec import verify_output
from g4debug.faults.grammar import Action


def install(injection: Injection) -> None:
    extend: list[Any] = [None]

    @injection.after("worker.verify")
    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        extend[0] = verify_output(result).draft_extend_input
        return result

    def swap(batch: Any, rows: list[int], action: Action) -> None:
        was = type(batch.spec_info).__name__
        batch.spec_info, extend[0] = extend[0], None
        injection.log(f"{type(batch.spec_info).__name__} in place of {was}, {len(rows)} requests")

    at_end_of_decode(injection, swap)
