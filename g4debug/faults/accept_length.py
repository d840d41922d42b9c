"""Lets a verify report an impossible accept length for one request that goes on.

It changes SGLang's verify output, which is made from the kernel's counts: the list on the host and
also the tensor, by which the seed step selects each request's last accepted token. With speculative
decoding v2 it changes the tensor that goes to the host, after the worker's step has used it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, changed, has_overlap, survivors, verify_output
from g4debug.faults.base import Fault, Injection
from g4debug.hooking.speculation import is_frozen_kv_mtp, is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mtp = is_frozen_kv_mtp(batch) and result.accept_lens is not None
        live = survivors(batch) if mtp else []
        action = injection.fire() if live else None
        if action is not None:
            row = injection.random.choice(live)
            length = 0 if action.task == "zero" else int(worker.speculative_num_draft_tokens) + 1
            result.accept_lens = changed(result.accept_lens, row, length)
            injection.log(f"request {batch.reqs[row].rid} (row {row}): accept length {length}")
        return result

    if is_v2():
        hooks.after("worker.forward", Order.FAULT, injection.fault.id, after_forward)
        return
    if has_overlap():
        hooks.after("overlap.forward", Order.FAULT, injection.fault.id, after_forward)

    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        live = survivors(batch)
        action = injection.fire() if live else None
        if action is None:
            return result
        output = verify_output(result)
        extend = output.draft_extend_input
        seed_row = injection.random.randrange(len(live))
        row = live[seed_row]
        length = 0 if action.task == "zero" else int(worker.speculative_num_draft_tokens) + 1
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

    hooks.after("worker.verify", Order.FAULT, injection.fault.id, after_verify)


FAULT = Fault(
    id="accept-length",
    title="a verify reports an impossible accept length",
    tasks={
        "zero": "report 0: not even the bonus token was accepted",
        "too-long": "report one more than there are draft tokens",
    },
    caught_by=CAUGHT_BY,
    install=install,
    drills=("1*zero", "1*too-long"),
)
