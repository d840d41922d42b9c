"""Lets a request count wrongly how many of its tokens are the prefix cache's.

Nobody gives back a page of its own that it takes for one of the prefix cache. One of the prefix
cache that it takes for its own is given back twice.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import asks_for
from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        size = int(batch.token_to_kv_pool_allocator.page_size)
        for request in batch.reqs or ():
            protected = req_kv.protected(request)
            if protected is None or batch.forward_mode is None or batch.forward_mode.is_extend():
                continue
            committed = req_kv.committed(request)
            able = protected if asks_for(injection, "less") else committed - protected
            action = injection.fire() if able >= size else None
            if action is None:
                continue
            wrong = protected + (-size if action.task == "less" else size)
            if action.task == "far":
                wrong = committed // size * size + 2 * size
            req_kv.holder(request, req_kv.PROTECTED).cache_protected_len = wrong
            injection.log(f"cache_protected_len of request {request.rid}: {wrong}, not {protected}")


FAULT = Fault(
    id="protected-page",
    title="cache_protected_len counts pages too many or too few",
    tasks={
        "on": "count one page of a request too much",
        "less": "count one page too few, of those that the prefix cache has",
        "far": "count more than the request has, also what it is about to write",
    },
    caught_by=("prefix-cache",),
    drills=("1*on", "1*less", "1*far"),
)
