"""Lets a request forget the tokens that it was allocated ahead, in its own books only.

Speculative decoding v2 allocates for the verify that is under way and for the next one. A request
that seems to have room only for its committed tokens is allocated it again.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, decodes, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.after("batch.prepare_for_decode")
    def after_prepare(result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch) if decodes(batch) else []
        if rows and injection.fire() is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            was, now = req_kv.allocated(request), req_kv.committed(request)
            req_kv.holder(request, "kv_allocated_len").kv_allocated_len = now
            injection.log(f"request {request.rid} (row {row}): kv_allocated_len {was} -> {now}")
        return result


FAULT = Fault(
    id="allocated-len",
    title="a request forgets what it was allocated ahead",
    tasks={"on": "kv_allocated_len falls to kv_committed_len"},
    caught_by=CAUGHT_BY,
    asks=("a draft",),
    needs=("future.publish",),
)
