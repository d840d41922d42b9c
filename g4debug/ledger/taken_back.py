"""Tells the ledger which pages the allocators' ``free``, ``free_swa`` and ``clear`` take back.

In contain mode a listener may correct what is about to be freed. Then the allocator gets the
corrected indices, and so does the ``free_swa`` that belongs to a free of full pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from g4debug.ledger import shadow as shadows
from g4debug.ledger.feed import Feed, caller
from g4debug.ledger.host import on_host
from g4debug.ledger.ledger import Pages, PoolLedger
from g4debug.ledger.shadow import FREE, HELD


class TakeBacks:
    """Hooks on ``free``, ``free_swa``, ``clear``, ``backup_state`` and ``restore_state``."""

    def __init__(self, feed: Feed) -> None:
        self.feed, self.ledger = feed, feed.ledger
        self._freeing = 0  # above 0 while SWATokenToKVPoolAllocator.free runs
        self._corrected: torch.Tensor | None = (
            None  # full-pool indices for the free_swa that follows
        )
        self._entered_free = feed.isolate(self._enter_free)
        self._entered_swa = feed.isolate(self._enter_free_swa)
        self._left_swa = feed.isolate(self._leave_free_swa)

    # --- one pool ------------------------------------------------------------------------

    def around_free(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor
    ) -> Any:
        corrected = self._entered_free(allocator, free_index)
        return call_next(allocator, free_index if corrected is None else corrected)

    def _enter_free(self, allocator: Any, free_index: torch.Tensor) -> torch.Tensor | None:
        """Enter a free. Returns the indices to free instead, or None to free those given."""
        pool = self.feed.pools.get(id(allocator))
        if pool is None or not allocator.is_not_in_free_group:
            return None
        expected = self.ledger.expected_swa if pool.name == "swa" else None
        if free_index.numel() == 0 and (expected is None or not len(expected)):
            return None
        self.ledger.settle(wait=True)
        tokens = on_host(free_index)
        # If a page is one token, SGLang puts an index that is given twice into its free list twice.
        pages = np.unique(tokens // pool.page_size) if pool.page_size > 1 else np.sort(tokens)
        alone = pool.name == "swa" and not self._freeing
        owners = set(pool.owner[pool.inside(pages)])
        freed = self.ledger.enter(
            pool,
            "evict" if alone else "free",
            pages,
            holds=False,
            request=f"{len(owners)} requests" if len(owners) > 1 else "".join(owners),
            caller=caller(),
        )
        corrected = None
        if freed is not pages:
            begins = torch.from_numpy(freed * pool.page_size)
            corrected = begins.to(device=free_index.device, dtype=free_index.dtype)
        if pool.name == "full":
            self._corrected = _only(free_index, tokens, freed, pool) if freed is not pages else None
            if self.ledger.shadow is not None:
                marked = free_index if corrected is None else corrected
                shadows.mark(self.ledger.shadow, marked.contiguous(), pool.page_size, FREE)
        else:
            pool.partner[pool.inside(freed)] = 0
        return corrected

    # --- full pages and their SWA pages -----------------------------------------------------

    def around_swa_free(self, call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._freeing += 1
        try:
            return call_next(*args, **kwargs)
        finally:
            self._freeing -= 1
            self._corrected = None

    def around_free_swa(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor
    ) -> Any:
        """Free the SWA pages of these full pages. If this is an eviction, the full pages stay."""
        if self._freeing and self._corrected is not None:
            free_index = self._corrected
        self._entered_swa(free_index)
        try:
            return call_next(allocator, free_index)
        finally:
            self._left_swa()

    def _enter_free_swa(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        pool = self.ledger.pools["full"]
        pages = np.unique(on_host(free_index) // pool.page_size)
        self.ledger.settle(wait=True)
        losing = self.ledger.losing_swa = pool.inside(pages)
        partners = pool.partner[losing]
        self.ledger.expected_swa = np.sort(partners[partners != 0])
        if self.ledger.shadow is not None:
            value = FREE if self._freeing else HELD
            shadows.mark(self.ledger.shadow, free_index.contiguous(), pool.page_size, value)

    def _leave_free_swa(self) -> None:
        if self.ledger.losing_swa is not None:
            self.ledger.pools["full"].partner[self.ledger.losing_swa] = 0
            self.ledger.losing_swa = self.ledger.expected_swa = None

    # --- everything at once -------------------------------------------------------------------

    def after_clear(self, result: Any, allocator: Any) -> None:
        pool = self.feed.pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        pages = pool.held.nonzero()[0]
        self.ledger.enter(pool, "clear", pages, holds=False, caller=caller())
        pool.forget()
        if pool.name == "full" and self.ledger.shadow is not None:
            self.ledger.shadow[:-1].fill_(FREE)

    def after_backup(self, result: Any, allocator: Any) -> None:
        pool = self.feed.pools.get(id(allocator))
        if pool is not None:
            self.ledger.backup(pool)

    def after_restore(self, result: Any, allocator: Any, state: Any) -> None:
        pool = self.feed.pools.get(id(allocator))
        if pool is not None:
            self.ledger.restore(pool)


def _only(indices: torch.Tensor, tokens: Pages, pages: Pages, pool: PoolLedger) -> torch.Tensor:
    """Those ``indices`` that are in ``pages``. ``tokens`` are the same indices on the host."""
    keep = np.isin(tokens // pool.page_size, pages)
    return indices[torch.from_numpy(keep).to(indices.device)]
