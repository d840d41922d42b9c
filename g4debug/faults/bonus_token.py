"""Lets a draft go on from another token than the last one of its request.

The verify begins with this token, too, so the answer is wrong.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, another, decodes, one_of, put, survivors
from g4debug.faults.base import Fault, Injection


def change(injection: Injection, batch: Any) -> None:
    """Give one request of a decode batch another token if the chain fires."""
    rows = survivors(batch) if decodes(batch) else []
    if not rows or injection.fire() is None:
        return
    (row, _, who), spec = one_of(injection, batch, rows), batch.spec_info
    lens = getattr(spec, "accept_lens", None)
    if lens is None:
        spec.bonus_tokens = another(spec.bonus_tokens, row)
    else:  # the draft reads all tokens that the last verify accepted
        at = row * (len(spec.accept_tokens) // len(lens)) + int(lens[row]) - 1
        spec.accept_tokens = another(spec.accept_tokens, at)
    injection.log(f"{who}: another bonus token")


def install(injection: Injection) -> None:
    @put(injection.before, "forward")
    def before_forward(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        change(injection, batch)


FAULT = Fault(
    id="bonus-token",
    title="a draft goes on from another token than the last one of its request",
    tasks={"on": "give one request another token"},
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    needs=("future.gather",),
)
