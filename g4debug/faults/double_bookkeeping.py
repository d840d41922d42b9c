"""Counts the accepted tokens of a verify a second time, for one request that goes on.

This is the bug of seed PR #24: SGLang's v1 verify (``eagle_info.py``) advances
``kv_committed_len``, ``output_ids`` and ``spec_verify_ct``, and so does its v2 result processing
(``scheduler_output_processor_mixin.py``). If v2 processes the result of a v1 worker, both do it.
Where there is v2 only, what processes the result counts a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.faults._spec import CAUGHT_BY, decodes, survivors, verify_output
from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action
from g4debug.hooking import req_kv
from g4debug.hooking.speculation import is_v2

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks


def count_again(request: Any, accepted: int, task: str) -> str:
    """Advance the fields of ``task`` again, as the v2 processing does. Returns it in words."""
    done = []
    if task in ("on", "kv"):
        req_kv.holder(request, "kv_committed_len").kv_committed_len += accepted
        done.append(f"kv_committed_len +{accepted}")
    if task in ("on", "output"):
        request.output_ids.extend(list(request.output_ids[-accepted:]))
        done.append(f"output_ids +{accepted}")
    if task in ("on", "verify-ct"):
        request.spec_verify_ct += 1
        done.append("spec_verify_ct +1")
    return ", ".join(done)


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    def after_resolve(kept: Any, processor: Any, result: Any, batch: Any) -> Any:
        rows = survivors(batch)
        action = injection.fire() if rows else None
        if action is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            done = count_again(request, len(kept[row]), action.task)
            injection.log(f"request {request.rid} (row {row}): {done} a second time")
        return kept

    if is_v2():
        hooks.after("result.resolve", Order.FAULT, injection.fault.id, after_resolve)
        return

    accepted: list[list[int]] = [[]]

    def after_verify(result: Any, worker: Any, batch: Any) -> Any:
        accepted[0] = [n + 1 for n in verify_output(result).num_correct_drafts_per_req_cpu]
        return result

    def after_forward(result: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = survivors(batch) if decodes(batch) else []
        action: Action | None = injection.fire() if rows and accepted[0] else None
        if action is not None:
            row = injection.random.choice(rows)
            request = batch.reqs[row]
            done = count_again(request, accepted[0][row], action.task)
            injection.log(f"request {request.rid} (row {row}): {done} a second time")
        return result

    hooks.after("worker.verify", Order.FAULT, injection.fault.id, after_verify)
    hooks.after("worker.forward", Order.FAULT, injection.fault.id, after_forward)


FAULT = Fault(
    id="double-bookkeeping",
    title="the accepted tokens of a verify are counted twice",
    tasks={
        "on": "in kv_committed_len, output_ids and spec_verify_ct",
        "kv": "only in kv_committed_len",
        "output": "only in output_ids",
        "verify-ct": "only in spec_verify_ct",
    },
    caught_by=CAUGHT_BY,
    install=install,
    drills=("1*on", "1*kv", "1*output", "1*verify-ct"),
)
