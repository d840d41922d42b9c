"""Counts the accepted tokens of a verify a second time, for one request that goes on.

This is the bug of seed PR #24, where both SGLang's v1 verify and its v2 result processing counted.
Here what processes the result counts a second time.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, one_of, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def count_again(request: Any, accepted: int, task: str) -> str:
    """Advance the fields of ``task`` again, as the v2 processing does. Returns it in words."""
    done = []
    if task in ("on", "kv"):
        req_kv.holder(request, "kv_committed_len").kv_committed_len += accepted
        done.append(f"kv_committed_len +{accepted}")
    if task in ("on", "output"):
        request.output_ids.extend(list(request.output_ids[-accepted:]))
        done.append(f"output_ids +{accepted}")
    if task in ("on", "verify-ct"):
        request.spec_verify_ct += 1
        done.append("spec_verify_ct +1")
    return ", ".join(done)


def install(injection: Injection) -> None:
    @injection.after("result.resolve")
    def after_resolve(kept: Any, processor: Any, result: Any, batch: Any) -> Any:
        rows = survivors(batch)
        action = injection.fire() if rows else None
        if action is not None:
            row, request, who = one_of(injection, batch, rows)
            done = count_again(request, len(kept[row]), action.task)
            injection.log(f"{who}: {done} a second time")
        return kept


FAULT = Fault(
    id="double-bookkeeping",
    title="the accepted tokens of a verify are counted twice",
    tasks={
        "on": "in kv_committed_len, output_ids and spec_verify_ct",
        "kv": "only in kv_committed_len",
        "output": "only in output_ids",
        "verify-ct": "only in spec_verify_ct",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    drills=("1*on", "1*kv", "1*output", "1*verify-ct"),
)
