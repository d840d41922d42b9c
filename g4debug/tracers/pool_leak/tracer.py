"""pool-leak: every KV page is free, held by the prefix cache, or owned by a live request.

The tracer counts all pages when the server becomes idle, before SGLang's own leak check does, and
after every ``G4DEBUG_LEAK_STEPS`` busy steps. It counts in SGLang's own structures: the allocators'
free lists, the nodes of the prefix cache, and the rows of live requests. The page ledger adds what
SGLang's check does not know: whose page it was, and what should have given it back. A count costs
O(pages of the pools). Between two counts there is next to no cost.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from g4debug.findings.record import Evidence
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.pool_leak.check import Census, Pages, take_census
from g4debug.tracers.pool_leak.report import describe, describe_rows

# The prefix caches that are known here. A subclass may hold pages elsewhere (in host memory).
CACHES = ("SWARadixCache", "RadixCache", "SWAChunkCache", "ChunkCache")
REMEMBERED = 4096  # requests whose release is remembered


class PoolLeakTracer:
    def __init__(self, context: Context) -> None:
        assert context.ledger is not None, "declared as ledger=True"
        self.context, self.ledger = context, context.ledger
        # rid -> (step, is_insert) of its release_kv_cache, the latest last
        self.released: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self.censuses = 0
        self._last_step = 0  # the step of the last census
        self._told: set[tuple[str, int]] = set()  # (pool, page) that were reported already
        self._usable: bool | None = None

    def install(self) -> None:
        self.context.before("scheduler.on_idle", self.before_idle)
        self.context.after("scheduler.process_result", self.after_result)
        self.context.before("cache.release", self.before_release)

    def before_release(
        self, request: Any, tree_cache: Any, is_insert: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        rid = str(request.rid)
        self.released[rid] = (self.context.recorder.step, is_insert)
        self.released.move_to_end(rid)
        if len(self.released) > REMEMBERED:
            self.released.popitem(last=False)

    def before_idle(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        # on_idle is called again and again while there is nothing to do.
        if self.context.recorder.step != self._last_step and scheduler.is_fully_idle():
            self.check(scheduler, idle=True)

    def after_result(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        every = self.context.settings.leak_steps
        if every and self.context.recorder.step - self._last_step >= every:
            self.check(scheduler, idle=False)
        return result

    def check(self, scheduler: Any, idle: bool) -> None:
        """Count all pages, and report those that are wrong."""
        self._last_step = self.context.recorder.step
        if self.ledger.broken or not self._is_usable(scheduler):
            return  # without the ledger it is not known which requests there are
        self.censuses += 1
        self.context.checked(1, "censuses")
        self.ledger.settle(wait=True)
        live = self.live_requests()
        for name, pages, free, owned in holders(scheduler, live):
            census = take_census(pages, free, owned)
            if not census.sound:
                self._report(name, census, live, idle)
        if idle and live:
            self._report_rows(live)

    def live_requests(self) -> list[Any]:
        """The requests that hold a row of req_to_token. Of a session, that is the one that runs."""
        known = list(self.ledger.requests.values())
        return [r for r in known if r.req_pool_idx is not None]

    def _report(self, pool: str, census: Census, live: list[Any], idle: bool) -> None:
        named = (census.leaked, census.double, census.repeated, census.outside)
        pages = {(pool, int(p)) for group in named for p in group}
        if pages <= self._told:
            return
        self._told |= pages
        finding, holdings, events = describe(pool, census, live, self.released, self.ledger, idle)
        self.context.trap.report(finding, Evidence(holdings=holdings, events=events))

    def _report_rows(self, live: list[Any]) -> None:
        """On an idle server no request may hold a row: its pages look owned, but are lost."""
        rows = {("row", int(r.req_pool_idx)) for r in live}
        if rows <= self._told:
            return
        self._told |= rows
        finding, holdings = describe_rows(live, self.released, self.ledger)
        self.context.trap.report(finding, Evidence(holdings=holdings))

    def _is_usable(self, scheduler: Any) -> bool:
        """True if everything that can hold pages in this server is known here."""
        if self._usable is None:
            name = type(scheduler.tree_cache).__name__
            topk = scheduler.server_args.speculative_eagle_topk or 1
            self._usable = name in CACHES and topk == 1
            if not self._usable:
                self.context.off(
                    f"it cannot check this server, whose prefix cache is {name} (known: "
                    f"{', '.join(CACHES)}) and whose speculative_eagle_topk is {topk} (known: 1)"
                )
        return self._usable


def holders(scheduler: Any, live: list[Any]) -> list[tuple[str, int, Pages, Pages]]:
    """(pool, pages, free pages, owned pages) of each pool, from SGLang's own structures.

    live: the requests that hold a row. This waits for the device, so it is for a census only.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    page_size = int(allocator.page_size)
    tokens = [*cached(scheduler.tree_cache), *rows(scheduler, live, page_size)]
    if not allocator.is_not_in_free_group:  # freed, but not given back yet, is no leak
        tokens += [_host(t) for t in allocator.free_group]
    owned = np.unique(np.concatenate([np.empty(0, np.int64), *tokens]) // page_size)
    full = getattr(allocator, "full_attn_allocator", allocator)
    found = [("full", int(full.size) // page_size + 1, _free(full), owned)]
    if full is not allocator:
        swa = allocator.swa_attn_allocator
        mapping = _host(allocator.full_to_swa_index_mapping[:-1:page_size]) // page_size
        inside = owned[(owned > 0) & (owned < len(mapping))]
        found.append(("swa", int(swa.size) // page_size + 1, _free(swa), mapping[inside]))
    return found


def cached(tree_cache: Any) -> list[Pages]:
    """The token indices that the nodes of the prefix cache hold. A chunk cache holds none."""
    root = getattr(tree_cache, "root_node", None)
    found, stack = [], list(root.children.values()) if root is not None else []
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if node.value is not None and len(node.value):
            found.append(node.value)
    if not found:
        return []
    import torch

    return [_host(torch.cat(found))]


def rows(scheduler: Any, live: list[Any], page_size: int) -> list[Pages]:
    """The token indices in the rows of live requests, as far as they are allocated."""
    table = scheduler.req_to_token_pool.req_to_token
    return [
        _host(
            table[
                r.req_pool_idx, : -(-int(r.kv_allocated_len) // page_size) * page_size : page_size
            ]
        )
        for r in live
        if r.kv_allocated_len > 0
    ]


def _free(allocator: Any) -> Pages:
    return np.concatenate([_host(allocator.free_pages), _host(allocator.release_pages)])


def _host(tensor: Any) -> Pages:
    found: Pages = tensor.detach().cpu().numpy().astype(np.int64)
    return found


def install(context: Context) -> None:
    PoolLeakTracer(context).install()


TRACER = Tracer(
    id="pool-leak",
    title="every KV page is free, cached, or owned by a live request",
    sites=("scheduler.on_idle", "scheduler.process_result", "cache.release"),
    install=install,
    ledger=True,
)
