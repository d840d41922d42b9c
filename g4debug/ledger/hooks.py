"""Feeds the page ledger from SGLang's allocators.

Each pool has an inner allocator; it tells which pages it hands out
(:mod:`g4debug.ledger.alloc_hooks`) and takes back (:mod:`g4debug.ledger.free_hooks`). The SWA
allocator around them tells which SWA page belongs to which full page, and whether SWA pages are
freed alone (evicted) or with their full pages. The hooks run outside the faults, so that they see
what a fault does, and inside the hooks of the tracers, which then find the ledger up to date.

A bug in here costs the ledger, never the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.hooking import targets
from g4debug.hooking.arguments import argument
from g4debug.hooking.hooks import Hooks, Order
from g4debug.hooking.older import older_module
from g4debug.ledger import token_rows
from g4debug.ledger.alloc_hooks import AllocHooks
from g4debug.ledger.free_hooks import FreeHooks
from g4debug.ledger.holders import Holders
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.pool_registry import PoolRegistry

OWNER = "ledger"


def free_hooks(registry: PoolRegistry) -> FreeHooks:
    """The hooks for the way in which this SGLang frees pages."""
    older = older_module("g4debug.ledger.free_hooks")
    kind: type[FreeHooks] = FreeHooks if older is None else older.FreeHooks
    return kind(registry)


class LedgerHooks:
    """The hooks of one process. A test or canary uses ``attach`` with allocators of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.registry = PoolRegistry(ledger)
        self.allocs = AllocHooks(self.registry)
        self.frees = free_hooks(self.registry)
        self._known: tuple[int, int] | None = None  # id and length of the last batch's requests

    def install(self, hooks: Hooks) -> None:
        """Put the hooks on the sites that this SGLang has."""
        isolate, allocs = self.registry.isolate, self.allocs
        after: dict[str, Callable[..., None]] = {
            "pool.init": self.after_init,
            "swa.init": self.after_swa_init,
            "pool.alloc": allocs.after_alloc,
            "pool.alloc_extend": allocs.after_extend,
            "pool.alloc_decode": allocs.after_decode,
            "swa.alloc_extend": allocs.after_swa_extend,
            "swa.alloc_decode": allocs.after_swa_decode,
            "swa.alloc": allocs.after_swa_alloc,
            "swa.set_mapping": allocs.after_set_mapping,
            "worker.target_forward": self.meanwhile,
            "scheduler.init": self.after_scheduler,
            **self.frees.after(),
        }
        for site in ("pool.alloc", "pool.alloc_extend", "pool.alloc_decode"):
            self._put(hooks.before, site, isolate(self.before_alloc))
        for site, hook in after.items():
            self._put(hooks.after, site, isolate(hook, watches=True))
        before: dict[str, Callable[..., None]] = {
            "batch.prepare_for_extend": self.before_extend,
            "batch.prepare_for_decode": self.before_decode,
            "scheduler.run_batch": self.before_run,
        }
        for site, (kind, place) in token_rows.SITES.items():
            self._put(hooks.around, site, self._during(before.get(site), place, kind))
        self._put(hooks.before, "worker.target_forward", isolate(self.before_forward))
        self._put(hooks.before, "scheduler.process_result", isolate(self.before_result))
        for site, hook in self.frees.around().items():
            self._put(hooks.around, site, hook)
        for site in ("swa.alloc", "swa.alloc_extend", "swa.alloc_decode"):
            self._put(hooks.around, site, allocs.around_swa_alloc)

    def _put(self, put: Callable[..., None], site: str, hook: Callable[..., Any]) -> None:
        for part in (site, f"{site}.token"):  # page size 1 has an allocator of its own
            if part in targets.SITES:
                put(part, Order.TRACER, OWNER, hook, optional=True)

    def _during(
        self, before: Callable[..., None] | None, position: int, kind: token_rows.Kind | None
    ) -> Callable[..., Any]:
        """Call ``before``, and note, while the site runs, for which batch pages are allocated.

        position: of the batch among the site's arguments. kind: what the site allocates for, None
        if it is not known.
        """
        ledger, allocs = self.ledger, self.allocs
        isolated = None if before is None else self.registry.isolate(before)

        def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if isolated is not None:
                isolated(*args, **kwargs)
            outer = ledger.allocating, allocs.kind
            ledger.allocating, allocs.kind = argument(args, kwargs, position, "batch"), kind
            try:
                return call_next(*args, **kwargs)
            finally:
                ledger.allocating, allocs.kind = outer

        return around

    # --- which allocator is which pool ---------------------------------------------------

    def attach(self, allocator: Any) -> None:
        """Learn an allocator that is there already."""
        if hasattr(allocator, "full_attn_allocator"):
            self.registry.know(allocator.full_attn_allocator, "full")
            self.registry.know(allocator.swa_attn_allocator, "swa")
        else:
            self.registry.know(allocator, "full")
        self.ledger.holders = Holders(allocator)

    def after_scheduler(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        holders = self.ledger.holders
        if holders is not None and holders.allocator is scheduler.token_to_kv_pool_allocator:
            holders.scheduler = scheduler
            # With overlap scheduling the copies would wait for the forward before this one.
            self.ledger.transport.gathers = not getattr(scheduler, "enable_overlap", True)

    def after_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        # If this is an inner allocator of a SWA allocator, after_swa_init corrects it.
        if not self.ledger.pools:
            self.attach(allocator)

    def after_swa_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        for known in (self.registry.pools, self.registry.lists):
            known.clear()
        self.ledger.pools.clear()
        self.ledger.lists.clear()
        self.attach(allocator)

    def before_alloc(self, allocator: Any, *args: Any, **kwargs: Any) -> None:
        lists = self.registry.lists.get(id(allocator))
        if lists is not None:
            lists.begins()

    # --- for whom ------------------------------------------------------------------------

    def before_extend(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.ledger.batch = batch
        for request in batch.reqs:
            self.ledger.requests[str(request.rid)] = request

    def before_decode(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        # Mostly this is the last step's batch, and its requests are known from their extend.
        known = (id(batch.reqs), len(batch.reqs))
        if known != self._known:
            self._known = known
            self.before_extend(batch)
        self.ledger.batch = batch

    def before_run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.ledger.batch = batch
        if self.ledger.owners is not None:
            rows = getattr(getattr(batch, "req_to_token_pool", None), "req_to_token", None)
            self.ledger.owners.protect(batch.reqs or [], rows)
        if not self.ledger.transport.gathers:  # otherwise that comes next, while the forward runs
            self.ledger.settle()

    def before_forward(self, *args: Any, **kwargs: Any) -> None:
        self.ledger.transport.before_forward()

    def meanwhile(self, *args: Any, **kwargs: Any) -> None:
        self.ledger.transport.meanwhile()

    def before_result(self, *args: Any, **kwargs: Any) -> None:
        # This step's allocations must be entered before its pages enter the prefix cache: later
        # it cannot be told any more whether a page was already held when it was handed out.
        self.ledger.settle(wait=True)
