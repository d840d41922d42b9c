"""Sets ``batch.spec_info`` to None at the end of a decode step with requests that go on."""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, at_end_of_decode
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action


def install(injection: Injection) -> None:
    def drop(batch: Any, rows: list[int], action: Action) -> None:
        kind = type(batch.spec_info).__name__
        batch.spec_info = None
        injection.log(f"{kind} of {len(rows)} requests dropped")

    at_end_of_decode(injection, drop)


FAULT = Fault(
    id="spec-info-dropped",
    title="batch.spec_info is None after a decode step whose requests go on",
    tasks={"on": "drop it"},
    caught_by=CAUGHT_BY,
    asks=("a draft",),
)
