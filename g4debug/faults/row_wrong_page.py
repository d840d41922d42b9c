"""Writes a wrong page into the prompt's part of a row of ``req_to_token``.

After its prefill a request has handed its prompt to the prefix cache, and ``cache_protected_len``
covers all of it. Page tables are built from the row, so they agree with it.
"""

from __future__ import annotations

from typing import Any

from g4debug.faults._spec import asks_for
from g4debug.faults.base import Fault, Injection
from g4debug.faults.row_foreign_page import whole_pages
from g4debug.hooking import req_kv


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        size = int(batch.token_to_kv_pool_allocator.page_size)
        able = [(r, pages) for r, pages in whole_pages(batch, size) if pages > 2]
        if not able or (asks_for(injection, "other") and len(able) < 2):
            return
        action = injection.fire()
        if action is None:
            return
        table = batch.req_to_token_pool.req_to_token
        order = injection.random.sample(able, len(able))
        (victim, pages), (owner, theirs) = order[0], order[-1]
        row, column = req_kv.row(victim), pages // 2
        last = pages - 1
        if action.task == "other":
            source = table[req_kv.row(owner), (theirs - 1) * size : theirs * size].clone()
            what = f"page {int(source[0]) // size} of {owner.rid}"
        else:
            source = table[row, last * size : pages * size].clone()
            what = f"its own page {int(source[0]) // size}, that of tokens {last * size} and on"
        here = table[row, column * size : (column + 1) * size]
        if action.task == "order":
            table[row, last * size : pages * size] = here.clone()
            what += ", and the other way round"
        here.copy_(source)
        injection.log(
            f"{action.task}: row {row} of {victim.rid} names {what} for tokens "
            f"{column * size}..{column * size + size - 1}"
        )


FAULT = Fault(
    id="row-wrong-page",
    title="a row of req_to_token names a wrong page in the middle",
    tasks={
        "other": "the newest page of another request",
        "own": "a page of its own that it has elsewhere, too",
        "order": "two pages of its own, exchanged",
    },
    caught_by=("page-table",),
    drills=("1*other", "1*own", "1*order"),
)
