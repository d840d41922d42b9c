"""Exchanges two whole pages in the full-to-SWA mapping: each SWA page still has one full page.

Nothing of SGLang's contradicts anything else, because both pages are mapped and no two full pages
share a SWA page. Sliding layers read and write the KV of other tokens.
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
        allocator = batch.token_to_kv_pool_allocator
        mapping = getattr(allocator, "full_to_swa_index_mapping", None)
        if mapping is None:
            return
        size, table = int(allocator.page_size), batch.req_to_token_pool.req_to_token
        newest: dict[str, tuple[int, int]] = {}  # the full pages of the last two whole ones
        for request, pages in whole_pages(batch, size):
            if pages > 1:
                firsts = table[req_kv.row(request), (pages - 2) * size : pages * size : size]
                first, second = (int(slot) // size for slot in firsts)
                if int(mapping[first * size]) > 0 and int(mapping[second * size]) > 0:
                    newest[request.rid] = first, second
        if not newest or (asks_for(injection, "other") and len(newest) < 2):
            return
        action = injection.fire()
        if action is None:
            return
        rids = injection.random.sample(list(newest), len(newest))
        one, other = newest[rids[0]]
        if action.task == "other":
            other = newest[rids[1]][1]
        here, there = (mapping[page * size : (page + 1) * size] for page in (one, other))
        kept = here.clone()
        here.copy_(there)
        there.copy_(kept)
        injection.log(
            f"{action.task}: full page {one} of {rids[0]} maps to SWA page "
            f"{int(here[0]) // size}, and full page {other} to SWA page {int(there[0]) // size}"
        )


FAULT = Fault(
    id="swa-mapping-exchange",
    title="two whole pages of the full-to-SWA mapping are exchanged",
    tasks={"own": "the last two whole pages of one request", "other": "those of two requests"},
    caught_by=("page-table",),
    asks=("a SWA pool",),
    drills=("1*own", "1*other"),
)
