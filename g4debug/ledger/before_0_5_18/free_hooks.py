"""SGLang's way to free until 0.5.17: ``free`` of a pool puts pages into the free list itself.

It does so outside of a free group; a deferred one is called again at the end of the group. The
allocators can also go back to a state that they saved, as the draft workers of that time let them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from g4debug.findings.record import PageEvent
from g4debug.hooking.free_group import in_free_group
from g4debug.ledger import shadow as shadows
from g4debug.ledger.before_0_5_21 import free_hooks as newer
from g4debug.ledger.books import Pages, PoolLedger, distinct
from g4debug.ledger.callsite import caller
from g4debug.ledger.free_hooks import Call
from g4debug.ledger.page_history import GIVES, TAKES
from g4debug.ledger.pool_registry import PoolRegistry
from g4debug.ledger.shadow import FREE, HELD


class FreeHooks(newer.FreeHooks):
    """Hooks on where pages come back, and on saved states."""

    def __init__(self, registry: PoolRegistry) -> None:
        super().__init__(registry)
        # Full indices that are freed just now with their SWA pages, and their pages.
        self._freed: tuple[Tensor, Pages] | None = None
        # Pool -> what changed since its state was saved: whether these pages were held before.
        self._since: dict[str, list[tuple[bool, Pages]]] = {}
        self._listens = False
        self._entered_free = registry.isolate(self._enter_free)

    def around(self) -> dict[str, Call]:
        return {
            "pool.free": self.around_free,
            "swa.free": self.around_swa_free,
            "swa.free_swa": self.around_free_swa,
        }

    def after(self) -> dict[str, Call]:
        return {
            "pool.clear": self.after_clear,
            "pool.backup_state": self.after_backup,
            "pool.restore_state": self.after_restore,
        }

    def around_free(self, free: Call, allocator: Any, free_index: Tensor) -> Any:
        """``free`` puts pages into the free list itself, outside of a free group."""
        if allocator.page_size == 1:
            return super().around_free(free, allocator, free_index)
        corrected = self._entered_free(allocator, free_index)
        try:
            return free(allocator, free_index if corrected is None else corrected)
        finally:
            self._released(allocator)

    def _enter_free(self, allocator: Any, free_index: Tensor) -> Tensor | None:
        """Enter a free. Returns the indices to free instead, or None to free those given."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None or in_free_group(allocator) or self._is_nothing(free_index):
            return None
        lists = self._seen(allocator)
        pages = distinct(self._read(free_index) // pool.page_size)
        lists.called, lists.entered = lists.called + 1, lists.entered + 1
        freed = self._enter(pool, pages, caller())
        corrected = None
        if freed is not pages:
            corrected = torch.from_numpy(freed * pool.page_size).to(free_index)
        if pool.name == "full":
            given = free_index if corrected is None else corrected
            shadows.mark(self.ledger.shadow, given, pool.page_size, FREE)
            if corrected is None and self._freeing:
                self._freed = free_index, pages
        return corrected

    def around_swa_free(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        try:
            return super().around_swa_free(free, allocator, free_index, **kw)
        finally:
            self._freed = None

    def _enter_free_swa(self, free_index: Tensor) -> None:
        if self._freed is not None and self._freed[0] is free_index:
            self._lose(self._freed[1])  # it was read a moment ago, and its pages marked as free
        else:
            super()._enter_free_swa(free_index)

    # --- saved states -------------------------------------------------------------------------

    def after_backup(self, result: Any, allocator: Any) -> None:
        """The allocator saved its state, so note all changes from now on."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        if not self._listens:  # not before: it must hear what the tracers let through
            self._listens = True
            self.ledger.listen(self._changes, *GIVES, *TAKES)
        self._since[pool.name] = []

    def _changes(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        if pool.name in self._since:
            inside, were = pool.inside(pages), event.kind not in GIVES
            self._since[pool.name].append((were, inside[pool.held[inside] == were]))

    def after_restore(self, result: Any, allocator: Any, state: Any) -> None:
        """The allocator went back to its saved state, so undo all changes since."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        lists = self.registry.lists[id(allocator)]
        lists.begins()
        lists.ends(restored=True)
        for held, pages in reversed(self._since.pop(pool.name, [])):
            pool.held[pages] = held
            pool.partner[pages] = -1  # SGLang does not put its mapping back
            if self.ledger.shadow is not None and pool.name == "full":
                indices = torch.from_numpy(pages).to(self.ledger.shadow.device)
                shadows.mark(self.ledger.shadow, indices, 1, HELD if held else FREE)
