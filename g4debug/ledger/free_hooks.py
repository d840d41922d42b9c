"""Tells the ledger which pages the allocators take back, and which full page loses its SWA page.

This is for SGLang 0.5.21 and later; the hooks for older releases lie in the folders ``before_``.
All pages enter the free list in one place (site ``pool.release``), whoever frees them; only if a
page is one token, ``free`` itself puts them there. So a free that SGLang defers to the end of a
free group is entered when it really happens. SWA pages are taken out of the mapping at once, and
freed at the end of the group. Then an event of its own ("unmap") says which SWA pages lost their
full pages.

In contain mode a listener may correct the indices that are about to be freed. Then the allocator
gets the corrected indices.

The request for which SGLang frees full pages is known only when SGLang calls ``free``: pages that
it defers to the end of a group are freed for all requests at once, and their SWA pages are gone by
then. So a tracer that judges this is asked first (``Ledger.asked``). Pages that must stay are left
out of both the free and the unmapping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from g4debug.hooking.free_group import in_free_group
from g4debug.ledger.books import FEW, Flags, Pages, Pairs, PoolLedger, distinct, on_host
from g4debug.ledger.callsite import caller
from g4debug.ledger.free_lists import FreeLists
from g4debug.ledger.pool_registry import PoolRegistry
from g4debug.ledger.shadow import FREE, HELD, Marks

Call = Callable[..., Any]


class FreeHooks:
    """Hooks on where pages come back, on the mapping, and on ``clear``."""

    def __init__(self, registry: PoolRegistry) -> None:
        self.registry, self.ledger = registry, registry.ledger
        self._freeing = 0  # above 0 while the SWA allocator frees full pages with their SWA pages
        self._changing: FreeLists | None = None  # of the allocator that takes pages back now
        self._unmapping = 0  # above 0 while SWA pages are taken out of the mapping to be freed
        # SWA page -> (the full page that it belonged to, whether it is freed without that), from
        # the moment in which it is taken out of the mapping until it is free.
        self._unmapped: dict[int, tuple[int, bool]] = {}
        self._entered_release = registry.isolate(self._enter_release)
        self._entered_unmap = registry.isolate(self._enter_unmap)
        self._asked = registry.isolate(self._ask)
        self.ledger.belongs = self.belongs

    def around(self) -> dict[str, Call]:
        """The hooks around sites, and their sites, innermost first."""
        return {
            "pool.release": self.around_release,
            "pool.free.token": self.around_free,
            "swa.free": self.around_swa_free,
            "swa.free_segment": self.around_swa_free,
            "pool.free": self.around_full_free,
            "pool.free_segment": self.around_full_free,
            "swa.free_swa": self.around_free_swa,
            "swa.free_swa_segment": self.around_free_swa,
        }

    def after(self) -> dict[str, Call]:
        """The hooks after sites, which are not isolated yet."""
        return {"pool.clear": self.after_clear, "swa.clear_mapping": self.after_clear_mapping}

    # --- one pool ------------------------------------------------------------------------

    def around_release(self, release: Call, allocator: Any, *page_ids: Tensor) -> Any:
        """``_release_page_ids`` puts pages into the free list, whoever freed them."""
        corrected = self._entered_release(allocator, page_ids)
        try:
            return release(allocator, *(page_ids if corrected is None else (corrected,)))
        finally:
            self._released(allocator)

    def _seen(self, allocator: Any) -> FreeLists:
        """The free lists of an allocator that is about to take pages back."""
        lists = self.registry.lists[id(allocator)]
        lists.begins()
        self._changing = lists
        return lists

    def _released(self, allocator: Any) -> None:
        """It has; if that was seen, see :meth:`_seen`."""
        lists, self._changing = self._changing, None
        if lists is not None:
            lists.ends()

    def around_free(self, free: Call, allocator: Any, free_index: Tensor) -> Any:
        """``free`` of pages of one token puts them into the free list itself."""
        if in_free_group(allocator):
            return free(allocator, free_index)
        return self.around_release(free, allocator, free_index)

    def _enter_release(self, allocator: Any, page_ids: tuple[Tensor, ...]) -> Tensor | None:
        """Enter a release. Returns the pages to release instead, or None to release these."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return None
        lists = self._seen(allocator)
        given = page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids)
        if self._is_nothing(given):
            return None
        where, shadow = caller(), self.ledger.shadow
        marks = Marks(shadow) if shadow is not None and pool.name == "full" else None
        lists.called += 1

        def enter(pages: Pages) -> Pages:
            lists.entered += 1
            return self._enter(pool, np.sort(pages), where)

        if self._may_wait(given):
            self.ledger.post(given, self.registry.once(enter), marks=marks)
            return None
        pages = np.sort(self._read(given))  # one that is given twice is freed twice
        lists.entered += 1
        freed = self._enter(pool, pages, where)
        corrected = None if freed is pages else torch.from_numpy(freed).to(given)
        if marks is not None:
            marks.make(given if corrected is None else corrected)
        return corrected

    def _is_nothing(self, given: Tensor) -> bool:
        """True if nothing is freed, and nothing was expected to be."""
        return given.numel() == 0

    def _may_wait(self, given: Tensor) -> bool:
        """True if a free may be entered when its indices have reached the host.

        SGLang itself does not wait for the device here. The free is then judged after it happened,
        but before anything of this step leaves the process.
        """
        return not self.ledger.judges_first and self.ledger.is_far(given)

    def _read(self, indices: Tensor) -> Pages:
        """The values of an index tensor, when all that was posted before is entered. Waits."""
        self.ledger.settle(wait=True)
        return on_host(indices)

    def _enter(self, pool: PoolLedger, pages: Pages, where: str) -> Pages:
        """Enter that these pages come back. Returns those that a listener lets through."""
        found = pages
        for kind, part in self._kinds(pool, pages):
            owners = pool.owners(part)
            whose = f"{len(owners)} requests" if len(owners) > 1 else "".join(owners)
            freed = self.ledger.enter(pool, kind, part, holds=False, request=whose, caller=where)
            if freed is not part:
                found = np.sort(np.concatenate((np.setdiff1d(found, part), freed)))
        if pool.name == "swa":
            pool.partner[pool.inside(found)] = 0
            for page in pages.tolist() if self._unmapped else ():
                self._unmapped.pop(page, None)
        return found

    def _kinds(self, pool: PoolLedger, pages: Pages) -> list[tuple[str, Pages]]:
        """The pages by the kind of their event: "evict" if a SWA page is freed alone."""
        unmapped = self._unmapped
        if pool.name != "swa" or not unmapped:
            return [("free" if pool.name != "swa" or self._freeing else "evict", pages)]
        together = [p in unmapped and not unmapped[p][1] for p in pages.tolist()]
        with_full = np.array(together, dtype=np.bool_)
        parts = [("free", pages[with_full]), ("evict", pages[~with_full])]
        return [(kind, part) for kind, part in parts if len(part)]

    # --- full pages ----------------------------------------------------------------------------

    def around_swa_free(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        """Free full pages and their SWA pages, now or at the end of a group."""
        instead = self._asked(allocator.full_attn_allocator, free_index, "start_pos" in kw)
        self._freeing += 1
        try:
            return free(allocator, free_index if instead is None else instead, **kw)
        finally:
            self._freeing -= 1

    def around_full_free(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        """Free full pages alone, now or at the end of a group: they have no SWA pages any more."""
        instead = None
        if not self._freeing:
            instead = self._asked(allocator, free_index, "start_pos" in kw)
        return free(allocator, free_index if instead is None else instead, **kw)

    def _ask(self, allocator: Any, free_index: Tensor, segment: bool) -> Tensor | None:
        """Ask whether these full pages may be freed. Returns the indices to free instead, or None.

        segment: the indices are consecutive tokens of a request, from the beginning of a page on.
        """
        pool, ledger = self.registry.pools.get(id(allocator)), self.ledger
        if pool is None or pool.name != "full" or free_index.numel() == 0:
            return None
        deferred = self._is_deferred()
        judges = [told for asked in ledger.asked if (told := asked(deferred)) is not None]
        if not judges:
            return None
        size, where = pool.page_size, caller()
        tokens = free_index[::size] if segment else free_index

        def staying(given: Pages) -> Pages:
            pages = pool.inside(distinct(given // size))
            event = ledger.event(pool, "free", pages, caller=where)
            return np.concatenate([judge(pool, event, pages) for judge in judges])

        if self._may_wait(tokens):
            ledger.post(tokens, self.registry.once(staying))
            return None
        given = self._read(tokens)
        stay = staying(given)
        if not len(stay):
            return None
        free = ~np.isin(given // size, stay)
        if segment:  # SGLang takes the first index of each page, so whole pages are left out
            free = np.repeat(free, size)[: free_index.numel()]
        return free_index[torch.from_numpy(free).to(free_index.device)]

    def _is_deferred(self) -> bool:
        """True if pages that are freed now wait for the end of a free group."""
        holders = self.ledger.holders
        return holders is not None and getattr(holders.allocator, "free_group", None) is not None

    # --- their SWA pages -----------------------------------------------------------------------

    def belongs(self, full: Pages, swa: Pages) -> Flags:
        """See ``Ledger.belongs``. Waits for the device."""
        holders, unmapped = self.ledger.holders, self._unmapped
        assert holders is not None, "known since the allocator was made"
        if not unmapped:
            return np.equal(holders.mapped(full), swa)
        return np.equal([unmapped.get(p, (-1, True))[0] for p in swa.tolist()], full)

    def around_free_swa(self, free: Call, allocator: Any, free_index: Tensor, **kw: Any) -> Any:
        """Free the SWA pages of these full pages. If this is an eviction, the full pages stay."""
        self._entered_unmap(allocator, free_index, "start_pos" in kw)
        self._unmapping += 1
        try:
            return free(allocator, free_index, **kw)
        finally:
            self._unmapping -= 1

    def _enter_unmap(self, allocator: Any, free_index: Tensor, segment: bool) -> None:
        """Enter that full pages lose their SWA pages, which are freed now or at a group's end.

        segment: as of :meth:`_ask`.
        """
        if free_index.numel() == 0:
            return
        mapping = allocator.full_to_swa_index_mapping
        tokens = free_index[:: self.ledger.pools["full"].page_size] if segment else free_index
        alone, where, marks = not self._freeing, caller(), self._parted()

        def enter(words: Pages) -> bool:
            """Returns whether there was anything to lose."""
            tokens, mapped = words.reshape(2, -1)
            pairs, mended = self._unmap(tokens, mapped, alone, where)
            if mended is not None and not self.ledger.late:
                self._mend(mapping, alone, pairs.full, mended)
            return bool(pairs.given.any() or mapped.any())

        if self._may_wait(tokens):
            self.ledger.post(tokens, self.registry.once(enter), mapping, marks)
            return
        tokens = tokens.to(torch.int64)
        mapped = mapping[tokens.clamp(0, len(mapping) - 1)]
        # Raises if a finding stops it: then it will not happen.
        if enter(self._read(torch.cat((tokens, mapped)))) and marks is not None:
            marks.make(tokens)

    def _parted(self) -> Marks | None:
        """The mark in the shadow for full pages that have no SWA pages any more."""
        size, shadow = self.ledger.pools["full"].page_size, self.ledger.shadow
        return None if shadow is None else Marks(shadow, size, HELD, unless_free=True)

    def _unmap(
        self, tokens: Pages, mapped: Pages, alone: bool, where: str
    ) -> tuple[Pairs, Pages | None]:
        """``mapped[i]`` is the mapping's entry for ``tokens[i]``.

        Returns the pairs by the ledger. If a listener wants the mapping to be mended, it also
        returns the right entries for these full pages.
        """
        pool, swa = self.ledger.pools["full"], self.ledger.pools["swa"]
        size = pool.page_size
        theirs = mapped > 0
        full, partners = _distinct_pairs(tokens[theirs] // size, mapped[theirs] // size)
        losing = pool.inside(distinct(tokens // size))
        pairs = self.ledger.pairs = Pairs(losing, pool.partner[losing])
        found, happened = distinct(partners), self.ledger.late
        try:
            kept = self.ledger.enter(swa, "unmap", found, holds=None, caller=where)
            happened = True
        finally:
            self.ledger.pairs = None
            if happened:
                pool.partner[losing] = 0
                swa.partner[swa.inside(found)] = 0
                for page, partner in zip(full.tolist(), partners.tolist(), strict=True):
                    self._unmapped[partner] = (page, alone)
        given = pairs.given
        return pairs, None if kept is found else np.where(np.isin(given, kept), given, 0)

    def _mend(self, mapping: Tensor, alone: bool, full: Pages, swa: Pages) -> None:
        """Let SGLang's mapping say that ``swa[i]`` is the SWA page of the full page ``full[i]``."""
        size = self.ledger.pools["full"].page_size
        for page, partner in zip(full.tolist(), swa.tolist(), strict=True):
            tokens = torch.arange(size) + partner * size if partner else torch.zeros(size)
            mapping[page * size : (page + 1) * size] = tokens.to(mapping)
            if partner:
                self._unmapped[partner] = (page, alone)

    def after_clear_mapping(self, result: Any, allocator: Any, full: Tensor) -> None:
        """The SWA pages of these full pages were given to others, or there are none."""
        if self._unmapping or full.numel() == 0:
            return
        pool, swa = self.ledger.pools["full"], self.ledger.pools["swa"]

        def enter(tokens: Pages) -> None:
            pages = pool.inside(distinct(tokens // pool.page_size))
            partners = pool.partner[pages]
            theirs = partners > 0
            mine = partners[theirs]
            swa.partner[mine[swa.partner[mine] == pages[theirs]]] = 0
            pool.partner[pages] = 0

        self.ledger.post(full, self.registry.once(enter), marks=self._parted())

    # --- everything at once -------------------------------------------------------------------

    def after_clear(self, result: Any, allocator: Any) -> None:
        """All pages of a pool are free."""
        pool = self.registry.pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        pages = pool.held.nonzero()[0]
        self.ledger.enter(pool, "clear", pages, holds=False, caller=caller())
        pool.forget()
        self.registry.lists[id(allocator)].forget()
        self._unmapped.clear()
        if pool.name == "full" and self.ledger.shadow is not None:
            self.ledger.shadow[:-1].fill_(FREE)


def _distinct_pairs(first: Pages, second: Pages) -> tuple[Pages, Pages]:
    """The pairs (first[i], second[i]), sorted, each once, in a third of np.unique's time.

    An eviction asks for each of its nodes, dozens of times before a prefill. They may be the arrays
    that were given.
    """
    if len(first) <= FEW:
        few = list(zip(first.tolist(), second.tolist(), strict=True))
        once = sorted(set(few))
        if once == few:
            return first, second
        pairs = np.array(once, dtype=np.int64)
        return pairs[:, 0], pairs[:, 1]
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]
