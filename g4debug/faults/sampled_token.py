"""Changes a sampled token, counts it twice, or exchanges those of two requests in the FutureMap.

The task ``past`` changes one that is part of the answer since an earlier step.

With speculative decoding the task ``on`` strikes a prefill: a verify samples in another way.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import (
    CAUGHT_BY,
    another,
    asks_for,
    is_decode,
    one_of,
    other_token,
    survivors,
)
from g4debug.faults.base import Fault, Injection

OLD = 8  # tokens of an answer whose first one no step reads any more


def install(injection: Injection) -> None:
    running: list[Any] = [None]  # the batch that the scheduler runs

    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        running[0] = batch
        rows = survivors(batch) if is_decode(batch) and asks_for(injection, "past") else []
        rows = [i for i in rows if len(batch.reqs[i].output_ids) >= OLD]
        if rows and injection.fire() is not None:
            _, request, who = one_of(injection, batch, rows)
            request.output_ids[0] = other_token(request.output_ids[0])
            injection.log(f"past: {who}: another token at the begin of its answer")

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

    @injection.after("scheduler.process_result")
    def after_process(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        plain = batch.forward_mode.is_decode() and batch.spec_algorithm.is_none()
        rows = survivors(batch) if plain and asks_for(injection, "twice") else []
        if rows and injection.fire() is not None:
            _, request, who = one_of(injection, batch, rows)
            request.output_ids.append(request.output_ids[-1])
            injection.log(f"twice: {who}: its last token once more")
        return result


FAULT = Fault(
    id="sampled-token",
    title="a token is changed between its sampling and the output or the next step",
    tasks={
        "on": "one request's sampled token becomes another one",
        "rows": "the tokens of two requests are exchanged on the way to the next step",
        "past": "one request's first token becomes another one, many steps after it was put out",
        "twice": "without a draft: one request's last token is put into its output once more",
    },
    caught_by=CAUGHT_BY,
    drills=("1*on", "1*rows", "1*past"),
    plain_drills=("1*on", "1*rows", "1*past", "1*twice"),
    needs=("result.resolve",),
)
