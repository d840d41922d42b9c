"""accept-length: v1's verify output, which is made from the kernel's counts.

It changes the list on the host and also the tensor, by which the seed step selects each request's
last accepted token.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults import accept_length
from g4debug.faults._spec import survivors
from g4debug.faults.base import Injection
from g4debug.faults.before_0_5_14._spec import verify_output


def install(injection: Injection) -> None:
    @injection.after("worker.verify")
    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        live = survivors(batch)
        action = injection.fire() if live else None
        if action is None:
            return result
        output = verify_output(result)
        extend = output.draft_extend_input
        seed_row = injection.random.randrange(len(live))
        row = live[seed_row]
        length = accept_length.impossible(action, worker)
        output.num_correct_drafts_per_req_cpu[row] = length - 1
        # Not in place: SGLang may share the list and the tensors with the batch.
        counts = list(extend.num_accept_tokens_cpu)
        was, counts[seed_row] = counts[seed_row], length
        extend.num_accept_tokens_cpu = counts
        extend.num_accept_tokens = extend.num_accept_tokens.clone()
        extend.num_accept_tokens[seed_row] = length
        extend.num_correct_drafts = extend.num_accept_tokens - 1
        injection.log(f"request {batch.reqs[row].rid} (row {row}): accept length {was} -> {length}")
        return result

    accept_length.install(injection)  # for 0.5.12's v2
