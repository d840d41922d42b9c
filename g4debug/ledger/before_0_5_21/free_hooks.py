"""SGLang's way to free until 0.5.20: ``free_swa`` looks up the SWA pages and frees them at once.

In a free group it is deferred as a whole, and called again at the end of the group. So there is no
event "unmap": the mapping is judged when the SWA pages that it names are freed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from g4debug.hooking import targets
from g4debug.hooking.free_group import in_free_group
from g4debug.ledger import free_hooks as newer
from g4debug.ledger import shadow as shadows
from g4debug.ledger.books import Pages, Pairs, PoolLedger, distinct, on_host
from g4debug.ledger.free_hooks import Call
from g4debug.ledger.pool_registry import PoolRegistry


class FreeHooks(newer.FreeHooks):
    """Hooks on where pages come back. In ``free_swa``, ``Ledger.pairs`` are those that it frees."""

    @staticmethod
    def fits() -> bool:
        """True if this SGLang frees so."""
        return targets.path("swa.free_swa_segment") is None is not targets.path("swa.free_swa")

    def __init__(self, registry: PoolRegistry) -> None:
        super().__init__(registry)
        self._kept: Pages | None = None  # full pages of a free that was corrected
        self._entered_swa = registry.isolate(self._enter_free_swa)
        self._left_swa = registry.isolate(self._leave_free_swa)

    def after(self) -> dict[str, Call]:
        return {"pool.clear": self.after_clear}

    def _is_nothing(self, given: Tensor) -> bool:
        pairs = self.ledger.pairs
        return given.numel() == 0 and (pairs is None or not pairs.given.any())

    def _may_wait(self, given: Tensor) -> bool:
        return self.ledger.pairs is None and super()._may_wait(given)

    def _is_deferred(self) -> bool:
        holders = self.ledger.holders
        return holders is not None and in_free_group(holders.allocator)

    def _enter(self, pool: PoolLedger, pages: Pages, where: str) -> Pages:
        found = super()._enter(pool, pages, where)
        if pool.name == "full":
            self._kept = found if found is not pages else None
        return found

    def around_swa_free(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        try:
            return super().around_swa_free(free, allocator, free_index, **kw)
        finally:
            self._kept = None

    def around_free_swa(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        """Free the SWA pages of these full pages. If this is an eviction, the full pages stay."""
        if hasattr(allocator, "swa_free_group") and in_free_group(allocator):
            return free(allocator, free_index, **kw)  # it is called again for all of them
        if self._freeing and self._kept is not None:
            size = self.ledger.pools["full"].page_size
            keep = torch.from_numpy(np.isin(on_host(free_index) // size, self._kept))
            free_index = free_index[keep.to(free_index.device)]
        self._entered_swa(free_index)
        try:
            return free(allocator, free_index, **kw)
        finally:
            self._left_swa()

    def _enter_free_swa(self, free_index: Tensor) -> None:
        if free_index.numel():
            self._lose(distinct(self._read(free_index) // self.ledger.pools["full"].page_size))
            shadows.mark(indices=free_index, **self._loses())

    def _lose(self, pages: Pages) -> None:
        """These full pages lose their SWA pages."""
        pool = self.ledger.pools["full"]
        losing = pool.inside(pages)
        self.ledger.pairs = Pairs(losing, pool.partner[losing])

    def _leave_free_swa(self) -> None:
        if self.ledger.pairs is not None:
            self.ledger.pools["full"].partner[self.ledger.pairs.full] = 0
            self.ledger.pairs = None
