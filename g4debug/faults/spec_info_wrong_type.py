"""Leaves the draft-extend input on the batch, where a draft input belongs.

It is as if the seed step had not run. Speculative decoding v2 has no such input: there the draft
input that the verify made stays, as if the draft extend had not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, at_end_of_decode, survivors, verify_output
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action
from g4debug.hooking.speculation import is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def around_extend(call_next: Any, worker: Any, batch: Any, result: Any) -> None:
        was = result.next_draft_input
        call_next(worker, batch, result)
        rows = survivors(batch)
        if rows and injection.fire() is not None:
            new, result.next_draft_input = result.next_draft_input, was
            kinds = f"{type(was).__name__} in place of {type(new).__name__}"
            injection.log(f"{kinds}, {len(rows)} requests")

    if is_v2():
        hooks.around("worker.draft_extend", Order.FAULT, injection.fault.id, around_extend)
        return

    extend: list[Any] = [None]

    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        extend[0] = verify_output(result).draft_extend_input
        return result

    def swap(batch: Any, rows: list[int], action: Action) -> None:
        was = type(batch.spec_info).__name__
        batch.spec_info, extend[0] = extend[0], None
        injection.log(f"{type(batch.spec_info).__name__} in place of {was}, {len(rows)} requests")

    hooks.after("worker.verify", Order.FAULT, injection.fault.id, after_verify)
    at_end_of_decode(hooks, injection, swap)


FAULT = Fault(
    id="spec-info-wrong-type",
    title="a draft-extend input is on the batch where a draft input belongs",
    tasks={"on": "put the draft-extend input there"},
    caught_by=CAUGHT_BY,
    install=install,
)
