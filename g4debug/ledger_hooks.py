"""Feeds the page ledger from SGLang's allocators.

The inner allocators (one per pool) say which pages they hand out and take back; the SWA
allocator around them says which SWA page goes with which full page, and whether SWA pages
are freed alone (evicted) or with their full pages. Pages of a deferred free (inside a "free
group") are entered when they are really freed. Below the tracers, above the faults.

A bug in here gives up the ledger, never the server.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from g4debug import targets
from g4debug.hooks import Hooks, Layer
from g4debug.kernels import page_shadow
from g4debug.kernels.page_shadow import FREE, HELD
from g4debug.ledger import Ledger, Pages, PoolLedger
from g4debug.trap import TrapError

logger = logging.getLogger("g4debug")
OWNER = "ledger"
# Frames that are never the caller a person looks for.
_OURS = str(Path(__file__).resolve().parent)
_SKIPPED = (
    "mem_cache/allocator",
    "mem_cache/swa_memory_pool",
    "mem_cache/common",
    "plugins/hook_registry",
    "functools",
    "contextlib",
    "torch/utils/_contextlib",
)


class LedgerHooks:
    """Hooks of one process. ``attach`` is also how a test feeds allocators of its own."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._pools: dict[int, PoolLedger] = {}  # by id() of the inner allocator
        self._inner: dict[str, torch.Tensor] = {}  # what the inner allocators handed out last
        self._freeing = 0  # inside SWATokenToKVPoolAllocator.free
        self._full_entered: Pages | None = None
        self._unpaired: Pages = np.empty(0, dtype=np.int64)

    def install(self, hooks: Hooks) -> None:
        """Put the hooks on the sites that this SGLang has."""
        before = {
            "pool.free": self.before_free,
            "swa.free_swa": self.before_free_swa,
            "batch.prepare_for_extend": self.before_batch,
            "batch.prepare_for_decode": self.before_batch,
        }
        after = {
            "pool.init": self.after_init,
            "swa.init": self.after_swa_init,
            "pool.alloc": self.after_alloc,
            "pool.alloc_extend": self.after_extend,
            "pool.alloc_decode": self.after_decode,
            "pool.clear": self.after_clear,
            "pool.backup_state": self.after_backup,
            "pool.restore_state": self.after_restore,
            "swa.alloc_extend": self.after_swa_alloc,
            "swa.alloc_decode": self.after_swa_alloc,
            "swa.alloc": self.after_swa_alloc,
            "swa.set_mapping": self.after_set_mapping,
            "swa.free_swa": self.after_free_swa,
        }
        for site, hook in before.items():
            self._put(hooks.before, site, self._guard(hook))
        for site, hook in after.items():
            self._put(hooks.after, site, self._guard_result(hook))
        hooks.before("scheduler.run_batch", Layer.TRACER, OWNER, self._guard(self.before_run))
        if targets.path("swa.free") is not None:
            hooks.around("swa.free", Layer.TRACER, OWNER, self._around_swa_free)

    def _put(self, put: Callable[..., None], site: str, hook: Callable[..., Any]) -> None:
        for part in (site, f"{site}.token"):  # page size 1 has an allocator of its own
            if part in targets.SITES and targets.path(part) is not None:
                put(part, Layer.TRACER, OWNER, hook)

    # --- which allocator is which pool ---------------------------------------------------

    def attach(self, allocator: Any) -> None:
        """Learn an allocator that was built before the hooks were (in a test)."""
        if hasattr(allocator, "full_attn_allocator"):
            self._know(allocator.full_attn_allocator, "full")
            self._know(allocator.swa_attn_allocator, "swa")
        else:
            self._know(allocator, "full")

    def _know(self, allocator: Any, name: str) -> None:
        page_size = int(allocator.page_size)
        pool = PoolLedger(name, int(allocator.size) // page_size + 1, page_size)
        self._pools[id(allocator)] = self.ledger.pools[name] = pool
        if name == "full":
            self.ledger.shadow = page_shadow.new(pool.pages, allocator.device)

    def after_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        if not self.ledger.pools:  # a SWA allocator that follows takes it over
            self._know(allocator, "full")

    def after_swa_init(self, result: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        self._pools.clear()
        self.ledger.pools.clear()
        self.attach(allocator)

    # --- pages handed out ----------------------------------------------------------------

    def after_extend(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, ...)``."""
        prefix = _argument(args, kwargs, 1, "prefix_lens_cpu").numpy()
        lengths = _argument(args, kwargs, 3, "seq_lens_cpu").numpy()
        self._handed_out(out, allocator, "extend", prefix, lengths)

    def after_decode(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """``alloc_decode(seq_lens, seq_lens_cpu, last_loc)``: one token per request."""
        lengths = _argument(args, kwargs, 1, "seq_lens_cpu").numpy()
        self._handed_out(out, allocator, "decode", lengths - 1, lengths)

    def _handed_out(
        self, out: Any, allocator: Any, kind: str, prefix: Pages, lengths: Pages
    ) -> None:
        """Enter the pages whose first token is in ``out``: those are new."""
        pool = self._pools.get(id(allocator))
        if pool is None:
            return
        self._inner.pop(pool.name, None)
        if out is None:
            self._exhausted(pool, kind, int((lengths - prefix).sum()))
            return
        self._inner[pool.name] = out
        size, start, offsets, positions, rows = pool.page_size, 0, [], [], []
        for row, (begin, end) in enumerate(zip(prefix.tolist(), lengths.tolist(), strict=True)):
            for position in range(-(-begin // size) * size, end, size):
                offsets.append(start + position - begin)
                positions.append(position)
                rows.append(row)
            start += end - begin
        if not offsets:
            return
        rids, caller = self._rids(len(lengths)), _caller()

        def enter(tokens: Pages) -> None:
            pages = tokens[offsets] // size
            for row in dict.fromkeys(rows):
                mine = np.array([r == row for r in rows])
                self.ledger.enter(
                    pool,
                    kind,
                    pages[mine],
                    holds=True,
                    request=rids[row],
                    positions=np.array(positions, dtype=np.int64)[mine],
                    caller=caller,
                )
            self._pair(pool, pages)

        self.ledger.post(out, enter)

    def after_alloc(self, out: Any, allocator: Any, need_size: int) -> None:
        """``alloc(need_size)``: whole pages (tokens, where a page is one token)."""
        pool = self._pools.get(id(allocator))
        if pool is None:
            return
        self._inner.pop(pool.name, None)
        if out is None:
            self._exhausted(pool, "alloc", int(need_size))
            return
        self._inner[pool.name] = out
        caller = _caller()

        def enter(tokens: Pages) -> None:
            pages = tokens[:: pool.page_size] // pool.page_size
            self.ledger.enter(pool, "alloc", pages, holds=True, caller=caller)
            self._pair(pool, pages)

        self.ledger.post(out, enter)

    def _exhausted(self, pool: PoolLedger, kind: str, tokens: int) -> None:
        none = np.empty(0, dtype=np.int64)
        note = f"no room for {tokens} tokens"
        self.ledger.settle(wait=True)
        self.ledger.enter(pool, kind, none, holds=None, caller=_caller(), note=note)

    def _pair(self, pool: PoolLedger, pages: Pages) -> None:
        """The SWA allocator asks both pools for the same positions, the full pool first."""
        if pool.name == "full":
            self._full_entered = pages
        elif self._full_entered is not None and len(self._full_entered) == len(pages):
            full = self.ledger.pools["full"]
            sound = (self._full_entered > 0) & (self._full_entered < full.pages)
            full.partner[self._full_entered[sound]] = pages[sound]
            self._full_entered = None

    def after_swa_alloc(self, out: Any, allocator: Any, *args: Any, **kwargs: Any) -> None:
        """Both inner allocations are done: the shadow of the full pages is their SWA page."""
        full, swa = self._inner.get("full"), self._inner.get("swa")
        if out is None or full is None or swa is None or self.ledger.shadow is None:
            return
        pool = self.ledger.pools["full"]
        page_shadow.mark(self.ledger.shadow, full, pool.page_size, swa=swa)

    def after_set_mapping(self, result: Any, allocator: Any, full: Any, swa: Any) -> None:
        """HiCache's load-back pairs pages that it allocated one by one."""
        pool = self.ledger.pools["full"]
        if self.ledger.shadow is not None:
            page_shadow.mark(self.ledger.shadow, full, pool.page_size, swa=swa)
        self.ledger.settle(wait=True)
        pages = full.cpu().to(torch.int64).numpy() // pool.page_size
        partner = swa.cpu().to(torch.int64).numpy() // pool.page_size
        inside = (pages > 0) & (pages < pool.pages)
        pool.partner[pages[inside]] = partner[inside]
        self.ledger.enter(pool, "map", np.unique(pages), holds=None, caller=_caller())

    # --- pages taken back ----------------------------------------------------------------

    def before_free(self, allocator: Any, free_index: torch.Tensor) -> None:
        pool = self._pools.get(id(allocator))
        if pool is None or not allocator.is_not_in_free_group or free_index.numel() == 0:
            return
        self.ledger.settle(wait=True)
        tokens = free_index.detach().cpu().to(torch.int64).numpy()
        pages = np.unique(tokens // pool.page_size)
        alone = pool.name == "swa" and not self._freeing
        owners = set(pool.owner[pool.inside(pages)])
        self.ledger.enter(
            pool,
            "evict" if alone else "free",
            pages,
            holds=False,
            request=owners.pop() if len(owners) == 1 else f"{len(owners)} requests",
            caller=_caller(),
        )
        if pool.name == "full" and self.ledger.shadow is not None:
            page_shadow.mark(self.ledger.shadow, free_index.contiguous(), pool.page_size, FREE)

    def before_free_swa(self, allocator: Any, free_index: torch.Tensor) -> None:
        """The SWA pages of these full pages go; the full pages stay if they are evicted."""
        if free_index.numel() == 0:
            return
        pool = self.ledger.pools["full"]
        pages = np.unique(free_index.detach().cpu().to(torch.int64).numpy() // pool.page_size)
        self.ledger.settle(wait=True)
        self._unpaired = pool.inside(pages)
        partners = pool.partner[self._unpaired]
        self.ledger.expected_swa = np.sort(partners[partners > 0])
        if self.ledger.shadow is not None:
            value = FREE if self._freeing else HELD
            page_shadow.mark(self.ledger.shadow, free_index.contiguous(), pool.page_size, value)

    def after_free_swa(self, result: Any, allocator: Any, free_index: torch.Tensor) -> None:
        if self.ledger.expected_swa is not None:
            self.ledger.pools["full"].partner[self._unpaired] = 0
            self.ledger.expected_swa = None

    def _around_swa_free(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._freeing += 1
        try:
            return call_next(*args, **kwargs)
        finally:
            self._freeing -= 1

    def after_clear(self, result: Any, allocator: Any) -> None:
        pool = self._pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        pages = pool.held.nonzero()[0]
        self.ledger.enter(pool, "clear", pages, holds=False, caller=_caller())
        pool.forget()
        if pool.name == "full" and self.ledger.shadow is not None:
            self.ledger.shadow[:-1].fill_(FREE)

    def after_backup(self, result: Any, allocator: Any) -> None:
        pool = self._pools.get(id(allocator))
        if pool is not None:
            self.ledger.backup(pool)

    def after_restore(self, result: Any, allocator: Any, state: Any) -> None:
        pool = self._pools.get(id(allocator))
        if pool is not None:
            self.ledger.restore(pool)

    # --- for whom ------------------------------------------------------------------------

    def before_batch(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.ledger.batch = batch
        for request in batch.reqs:
            self.ledger.requests[str(request.rid)] = request

    def before_run(self, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        self.ledger.batch = batch
        self.ledger.settle()

    def _rids(self, rows: int) -> list[str]:
        """rid of each row of an allocation; '' where the batch is not the one that asks."""
        requests = self.ledger.batch.reqs if self.ledger.batch is not None else ()
        return [str(r.rid) for r in requests] if len(requests) == rows else [""] * rows

    # --- never a second fault --------------------------------------------------------------

    def _guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.ledger.broken:
                return
            try:
                hook(*args, **kwargs)
            except TrapError:
                raise
            except Exception as e:
                self.ledger.give_up(f"{type(e).__name__}: {e}")
                logger.exception(
                    "g4debug: the page ledger failed in %s and is off in this process; checks "
                    "that need it are off, serving goes on. Please report this.",
                    getattr(hook, "__name__", "a hook"),
                )

        return guarded

    def _guard_result(self, hook: Callable[..., None]) -> Callable[..., Any]:
        guarded = self._guard(hook)

        def after(result: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(result, *args, **kwargs)
            return result

        return after


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs[name]


_uninteresting: dict[Any, bool] = {}


def _caller() -> str:
    """``schedule_batch.py:2744 _evict_swa``: the innermost frame above the allocators."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        skip = _uninteresting.get(code)
        if skip is None:
            name = code.co_filename
            skip = name.startswith(_OURS) or any(part in name for part in _SKIPPED)
            _uninteresting[code] = skip
        if not skip:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
