"""Lets a request take one of its own pages for one of the prefix cache: nobody gives it back."""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        size = int(scheduler.token_to_kv_pool_allocator.page_size)
        for request in batch.reqs or ():
            protected = req_kv.protected(request)
            if protected is None or batch.forward_mode is None or batch.forward_mode.is_extend():
                continue
            if protected + size > req_kv.committed(request):
                continue
            if injection.fire() is None:
                continue
            holder = req_kv.holder(request, req_kv.PROTECTED)
            holder.cache_protected_len = protected + size
            injection.log(
                f"cache_protected_len of request {request.rid}: {protected + size}, not {protected}"
            )


FAULT = Fault(
    id="protected-page",
    title="cache_protected_len counts one page too much",
    tasks={"on": "count one page of a request too much"},
    caught_by=("prefix-cache",),
)
