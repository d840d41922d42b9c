"""Writes another live request's page into a row of ``req_to_token``.

Page tables are built from these rows, so they agree with them: nothing looks wrong except the owner
of the page. The request then reads a page that belongs to somebody else, and frees it at its end.
Only pages that the prefix cache did not lend are touched: pages that a request shares with
others are left alone.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = batch.forward_mode.name.lower() if batch.forward_mode else ""
        if mode != "decode":  # a prefill has only just got its pages
            return
        size = int(batch.token_to_kv_pool_allocator.page_size)
        able = [(request, _column(request, n, size)) for request, n in running(batch)]
        able = [(request, column) for request, column in able if column >= 0]
        if len(able) < 2 or not injection.fire(mode=mode):
            return
        (victim, column), (owner, theirs) = injection.random.sample(able, 2)
        table = batch.req_to_token_pool.req_to_token
        here, there = column * size, theirs * size
        page = int(table[req_kv.row(owner), there]) // size
        row = table[req_kv.row(victim), here : here + size]
        row.copy_(row % size + page * size)
        injection.log(
            f"row {req_kv.row(victim)} of {victim.rid} names page {page} of {owner.rid} for "
            f"tokens {here}..{here + size - 1}"
        )


def running(batch: Any) -> list[tuple[Any, int]]:
    """The requests of a batch and how many of their tokens have KV."""
    if batch.seq_lens_cpu is None:  # with overlap scheduling, the last forward has not told yet
        return [(request, req_kv.committed(request)) for request in batch.reqs]
    return list(zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True))


def whole_pages(batch: Any, size: int) -> list[tuple[Any, int]]:
    """The requests that decode and go on, and how many whole pages of tokens each of them has."""
    if batch.forward_mode is None or not batch.forward_mode.is_decode():
        return []
    return [(r, tokens // size) for r, tokens in running(batch) if not r.finished()]


def _column(request: Any, tokens: int, size: int) -> int:
    """The column of the newest page that is the request's own; a full one if there is one."""
    newest, protected = (tokens - 1) // size, req_kv.protected(request)
    if protected is None:
        return -1
    if tokens % size and (newest - 1) * size >= protected:
        newest -= 1
    return newest if newest * size >= protected else -1


FAULT = Fault(
    id="row-foreign-page",
    title="a row of req_to_token names another live request's page",
    tasks={"on": "write one page of another request into one row"},
    caught_by=("page-table",),
    selectors=("mode",),
)
