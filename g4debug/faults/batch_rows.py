"""Exchanges the rows of two requests in ``req_pool_indices`` of a batch, for one step.

Each of them then reads and writes the other one's KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.faults._spec import is_decode, survivors
from g4debug.faults.base import Fault, Injection


def install(injection: Injection) -> None:
    @injection.around("scheduler.run_batch")
    def around_run(
        call_next: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rows = survivors(batch) if is_decode(batch) else []
        if len(rows) < 2 or injection.fire() is None:
            return call_next(scheduler, batch, *args, **kwargs)
        a, b = sorted(injection.random.sample(rows, 2))
        right = batch.req_pool_indices
        wrong = right.clone()
        wrong[[a, b]] = right[[b, a]]
        rids = f"{batch.reqs[a].rid} and {batch.reqs[b].rid}"
        injection.log(f"the rows of {rids} are exchanged (rows {a} and {b} of the batch)")
        batch.req_pool_indices = wrong
        try:
            return call_next(scheduler, batch, *args, **kwargs)
        finally:
            if batch.req_pool_indices is wrong:
                batch.req_pool_indices = right


FAULT = Fault(
    id="batch-rows",
    title="two requests have each other's row in req_pool_indices",
    tasks={"on": "exchange the rows of two requests for one step"},
    caught_by=("page-table",),
)
