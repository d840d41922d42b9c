"""Changes a sampled token, or exchanges the tokens of two requests in SGLang's FutureMap.

With speculative decoding the task ``on`` strikes a prefill: a verify samples in another way.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, asks_for, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.verify_input import another


def install(injection: Injection) -> None:
    running: list[Any] = [None]  # the batch that the scheduler runs

    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        running[0] = batch

    @injection.after("worker.target_forward")
    def after_forward(result: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, batch = result.next_token_ids, running[0]
        if batch is None or not hasattr(tokens, "clone") or len(tokens) != len(batch.reqs):
            return result
        ends = [
            i for i in survivors(batch) if not getattr(batch.reqs[i], "inflight_middle_chunks", 0)
        ]
        if ends and asks_for(injection, "on") and injection.fire() is not None:
            row = injection.random.choice(ends)
            result.next_token_ids = another(tokens, row)
            injection.log(f"on: request {batch.reqs[row].rid} (row {row}): another token")
        return result

    @injection.after("future.stash")
    def after_stash(result: Any, future_map: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        batch = running[0]
        rows = survivors(batch) if batch is not None and len(indices) == len(batch.reqs) else []
        if len(rows) > 1 and asks_for(injection, "rows") and injection.fire() is not None:
            a, b = sorted(injection.random.sample(rows, 2))
            where = indices[[a, b]]
            future_map.output_tokens_buf[where] = future_map.output_tokens_buf[where.flip(0)]
            injection.log(f"rows: the tokens of rows {a} and {b} exchanged")
        return result


FAULT = Fault(
    id="sampled-token",
    title="a token is changed between its sampling and the output or the next step",
    tasks={
        "on": "one request's sampled token becomes another one",
        "rows": "the tokens of two requests are exchanged on the way to the next step",
    },
    caught_by=CAUGHT_BY,
    drills=("1*on", "1*rows"),
    plain_drills=("1*on", "1*rows"),
    needs=("result.resolve",),
)
