"""Puts the row of a running request into the list of free rows: a later request gets it, too."""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import is_decode, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        rows = survivors(batch) if is_decode(batch) else []
        if not rows or injection.fire() is None:
            return
        request = batch.reqs[injection.random.choice(rows)]
        row = req_kv.row(request)
        batch.req_to_token_pool.free_slots.append(row)
        injection.log(f"row {row} of request {request.rid}, which runs, is free")


FAULT = Fault(
    id="row-free",
    title="the row of a running request is in the list of free rows",
    tasks={"on": "put one row into the list"},
    caught_by=("pool-leak",),
)
