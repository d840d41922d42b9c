"""Changes the result of a verify: how many tokens it accepts, which ones, or of which request.

The numbers stay possible ones. The next step goes on from them, so the answer is wrong.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import CAUGHT_BY, another, asks_for, changed, one_of, put, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.faults.verify_input import exchanged


def install(injection: Injection) -> None:
    @put(injection.after, "verify")
    def after_verify(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch) if result.accept_lens is not None else []
        if not rows or (asks_for(injection, "rows") and len(rows) < 2):
            return result
        action = injection.fire()
        if action is None:
            return result
        width = int(result.speculative_num_draft_tokens)
        if action.task == "rows":
            a, b = sorted(injection.random.sample(rows, 2))
            result.next_token_ids = exchanged(result.next_token_ids, a, b, width)
            injection.log(f"rows: the tokens of rows {a} and {b} exchanged")
            return result
        row, _, who = one_of(injection, batch, rows)
        had = int(result.accept_lens[row])
        if action.task == "length":
            by = 1 if had < width else -1
            result.accept_lens = changed(result.accept_lens, row, had + by)
            new = int(result.new_seq_lens[row])
            result.new_seq_lens = changed(result.new_seq_lens, row, new + by)
            injection.log(f"length: {who}: accept length {had + by} in place of {had}")
        else:
            result.next_token_ids = another(result.next_token_ids, row * width + had - 1)
            injection.log(f"token: {who}: another bonus token is put out")
        return result


FAULT = Fault(
    id="verify-result",
    title="a verify hands on what its kernel did not compute",
    tasks={
        "length": "one request accepts a token more or less, within what is possible",
        "token": "the last token that one request is given is another one",
        "rows": "the tokens of two requests are exchanged",
    },
    caught_by=CAUGHT_BY,
    asks=("a draft model",),
    drills=("1*length", "1*token", "1*rows"),
    needs=("result.resolve",),
)
