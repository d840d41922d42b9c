"""Lets a draft go on from another token than the last one of its request.

The verify begins with this token, too, so the answer is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, changed, decodes, survivors
from g4debug.faults.base import Fault, Injection
from g4debug.hooking.speculation import is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def before_forward(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        rows = survivors(batch) if decodes(batch) else []
        if not rows or injection.fire() is None:
            return
        row, spec = injection.random.choice(rows), batch.spec_info
        token = int(spec.bonus_tokens[row])
        spec.bonus_tokens = changed(spec.bonus_tokens, row, token - 1 if token else 1)
        injection.log(f"request {batch.reqs[row].rid} (row {row}): another bonus token")

    def after_read(result: Any, future_map: Any, batch: Any) -> Any:
        before_forward(None, batch)
        return result

    if is_v2():
        hooks.before("worker.forward", Order.FAULT, injection.fault.id, before_forward)
    else:  # 0.5.12 with the path frozen-kv-mtp-v2
        hooks.after("overlap.resolve", Order.FAULT, injection.fault.id, after_read)


FAULT = Fault(
    id="bonus-token",
    title="a draft goes on from another token than the last one of its request",
    tasks={"on": "give one request another token"},
    caught_by=CAUGHT_BY,
    install=install,
    needs=("future.gather",),
    overlapped=True,
)
