"""Writes another request's page of the same place into the part of a row that the cache lent.

The prefix cache lends a request the pages of its first tokens. Other requests may read these pages
by right, in the same columns, so neither the owner of a page nor its column tells that it is wrong.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults.base import Fault, Injection
from g4debug.faults.row_foreign_page import whole_pages
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        size = int(batch.token_to_kv_pool_allocator.page_size)
        table = batch.req_to_token_pool.req_to_token
        able = whole_pages(batch, size)
        found = [
            (victim, owner, column)
            for victim, _ in able
            for column in range(min(victim.cached_tokens, req_kv.protected(victim) or 0) // size)
            for owner, pages in able
            if column < pages and _differ(table, victim, owner, column * size)
        ]
        if not found or not injection.fire():
            return
        victim, owner, column = injection.random.choice(found)
        part = slice(column * size, (column + 1) * size)
        source = table[req_kv.row(owner), part].clone()
        table[req_kv.row(victim), part] = source
        injection.log(
            f"row {req_kv.row(victim)} of {victim.rid} names page {int(source[0]) // size} of "
            f"{owner.rid} for tokens {part.start}..{part.stop - 1}, which the prefix cache lent it"
        )


def _differ(table: Any, one: Any, other: Any, token: int) -> bool:
    return bool(table[req_kv.row(one), token] != table[req_kv.row(other), token])


FAULT = Fault(
    id="lent-row-page",
    title="a row of req_to_token names another page than the prefix cache lent, in the same place",
    tasks={"on": "write the page that another request has for the same tokens"},
    caught_by=("prefix-cache",),
    asks=("a prefix cache",),
)
