"""Tells the ledger which pages the allocators take back, and which full page loses its SWA page.

Where pages enter the free list differs between releases. From 0.5.18 on it is one place for all
kinds of frees (site ``pool.release``); before, it is ``free`` outside of a free group. So a free
that SGLang defers to the end of a group is entered when it really happens.

In which order SGLang frees the two pages of a token differs, too. Up to 0.5.18, ``free_swa`` looks
up the SWA pages and frees them in the same call; a deferred one is called again at the end of the
group. From 0.5.21 on it takes them out of the mapping at once, and frees them at the end of the
group. Then an event of its own ("unmap") says which SWA pages lost their full pages.

In contain mode a listener may correct what is about to be freed. Then the allocator gets the
corrected indices, and so does the ``free_swa`` that belongs to a free of full pages.

For whom SGLang frees full pages is known only when it asks for it: what it defers to the end of a
group is freed for all requests at once. And from 0.5.21 on the SWA pages are gone when the full
pages are freed. So whoever judges that is asked first (``Ledger.asked``), and what must stay is
left out of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from g4debug.hooking.free_group import in_free_group
from g4debug.ledger import shadow as shadows
from g4debug.ledger.host import distinct, on_host
from g4debug.ledger.ledger import Pages, PoolLedger
from g4debug.ledger.pool_registry import PoolRegistry, caller
from g4debug.ledger.shadow import FREE, HELD


class TakeBacks:
    """Hooks on where pages come back, on the mapping, ``clear`` and saved states."""

    def __init__(self, feed: PoolRegistry) -> None:
        self.feed, self.ledger = feed, feed.ledger
        self._freeing = 0  # above 0 while the SWA allocator frees full pages with their SWA pages
        self._unmapping = 0  # above 0 while SWA pages are taken out of the mapping to be freed
        self._kept: Pages | None = None  # full pages of a free that was corrected
        # Full indices that are freed just now with their SWA pages, and their pages.
        self._freed: tuple[torch.Tensor, Pages] | None = None
        self._entered_free = feed.isolate(self._enter_free)
        self._entered_release = feed.isolate(self._enter_release)
        self._entered_swa = feed.isolate(self._enter_free_swa)
        self._left_swa = feed.isolate(self._leave_free_swa)
        self._entered_unmap = feed.isolate(self._enter_unmap)
        self._asked = feed.isolate(self._ask)

    # --- one pool ------------------------------------------------------------------------

    def around_free(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor
    ) -> Any:
        """``free`` puts pages into the free list itself, outside of a free group."""
        corrected = self._entered_free(allocator, free_index)
        return call_next(allocator, free_index if corrected is None else corrected)

    def around_release(
        self, call_next: Callable[..., Any], allocator: Any, *page_ids: torch.Tensor
    ) -> Any:
        """``_release_page_ids`` puts pages into the free list, whoever freed them."""
        corrected = self._entered_release(allocator, page_ids)
        return call_next(allocator, *(page_ids if corrected is None else (corrected,)))

    def _enter_free(self, allocator: Any, free_index: torch.Tensor) -> torch.Tensor | None:
        """Enter a free. Returns the indices to free instead, or None to free those given."""
        pool = self.feed.pools.get(id(allocator))
        if pool is None or in_free_group(allocator) or self._is_nothing(pool, free_index):
            return None
        size = pool.page_size
        if size == 1 and self._may_wait(free_index):
            self._enter_later(pool, free_index)
            return None
        self.ledger.settle(wait=True)
        tokens = on_host(free_index)
        # If a page is one token, SGLang puts an index that is given twice into its free list twice.
        pages = distinct(tokens // size) if size > 1 else np.sort(tokens)
        freed = self._enter(pool, pages, caller())
        corrected = None
        if freed is not pages:
            begins = torch.from_numpy(freed * size)
            corrected = begins.to(device=free_index.device, dtype=free_index.dtype)
        self._mark_free(pool, free_index if corrected is None else corrected)
        if corrected is None and self._freeing and pool.name == "full" and size > 1:
            self._freed = free_index, pages
        return corrected

    def _enter_release(
        self, allocator: Any, page_ids: tuple[torch.Tensor, ...]
    ) -> torch.Tensor | None:
        """Enter a release. Returns the pages to release instead, or None to release these."""
        pool = self.feed.pools.get(id(allocator))
        if pool is None:
            return None
        given = page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids)
        if self._is_nothing(pool, given):
            return None
        if self._may_wait(given):
            self._enter_later(pool, given)
            return None
        self.ledger.settle(wait=True)
        pages = np.sort(on_host(given))
        freed = self._enter(pool, pages, caller())
        corrected = None
        if freed is not pages:
            corrected = torch.from_numpy(freed).to(device=given.device, dtype=given.dtype)
        self._mark_free(pool, (given if corrected is None else corrected) * pool.page_size)
        return corrected

    def _is_nothing(self, pool: PoolLedger, given: torch.Tensor) -> bool:
        """True if nothing is freed, and nothing was expected to be."""
        expected = self.ledger.expected_swa if pool.name == "swa" else None
        return given.numel() == 0 and (expected is None or not len(expected))

    def _may_wait(self, given: torch.Tensor) -> bool:
        """True if a free may be entered when its indices have reached the host.

        SGLang itself does not wait for the device here. What is freed is then judged after it
        happened, but before anything of this step leaves the process.
        """
        ledger = self.ledger
        return ledger.is_far(given) and ledger.expected_swa is None and not ledger.judges_first

    def _enter_later(self, pool: PoolLedger, given: torch.Tensor) -> None:
        """given: pages."""
        where = caller()

        def enter(pages: Pages) -> None:
            self._enter(pool, np.sort(pages), where)

        one = 1 if pool.name == "full" else 0
        self.ledger.post(given, self.feed.once(enter), page_size=one)

    def _enter(self, pool: PoolLedger, pages: Pages, where: str) -> Pages:
        """Enter that these pages come back. Returns those that a listener lets through."""
        found = pages
        for kind, part in self._kinds(pool, pages):
            owners = set(pool.owner[pool.inside(part)])
            freed = self.ledger.enter(
                pool,
                kind,
                part,
                holds=False,
                request=f"{len(owners)} requests" if len(owners) > 1 else "".join(owners),
                caller=where,
            )
            if freed is not part:
                found = np.sort(np.concatenate((np.setdiff1d(found, part), freed)))
        if pool.name == "swa":
            pool.partner[pool.inside(found)] = 0
            for page in pages.tolist() if self.ledger.parted else ():
                self.ledger.parted.pop(page, None)
        else:
            self._kept = found if found is not pages else None
        return found

    def _kinds(self, pool: PoolLedger, pages: Pages) -> list[tuple[str, Pages]]:
        """The pages by the kind of their event: "evict" if a SWA page is freed alone."""
        parted = self.ledger.parted
        if pool.name != "swa":
            return [("free", pages)]
        if not parted:
            return [("free" if self._freeing else "evict", pages)]
        together = [p in parted and not parted[p][1] for p in pages.tolist()]
        with_full = np.array(together, dtype=np.bool_)
        parts = [("free", pages[with_full]), ("evict", pages[~with_full])]
        return [(kind, part) for kind, part in parts if len(part)]

    def _mark_free(self, pool: PoolLedger, tokens: torch.Tensor) -> None:
        if pool.name == "full" and self.ledger.shadow is not None:
            shadows.mark(self.ledger.shadow, tokens.contiguous(), pool.page_size, FREE)

    # --- full pages and their SWA pages -----------------------------------------------------

    def around_swa_free(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Free full pages and their SWA pages, now or at the end of a group."""
        instead = self._asked(allocator.full_attn_allocator, free_index, "start_pos" in kwargs)
        self._freeing += 1
        try:
            return call_next(allocator, free_index if instead is None else instead, **kwargs)
        finally:
            self._freeing -= 1
            self._kept = self._freed = None

    def around_full_free(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Free full pages alone, now or at the end of a group: they have no SWA pages any more."""
        instead = None
        if not self._freeing:
            instead = self._asked(allocator, free_index, "start_pos" in kwargs)
        return call_next(allocator, free_index if instead is None else instead, **kwargs)

    def _ask(self, allocator: Any, free_index: torch.Tensor, segment: bool) -> torch.Tensor | None:
        """Ask whether these full pages may be freed. Returns the indices to free instead, or None.

        segment: as of :meth:`_enter_unmap`.
        """
        pool, ledger = self.feed.pools.get(id(allocator)), self.ledger
        if pool is None or pool.name != "full" or free_index.numel() == 0:
            return None
        judges = [told for asked in ledger.asked if (told := asked()) is not None]
        if not judges:
            return None
        size, where = pool.page_size, caller()
        tokens = free_index[::size] if segment else free_index

        def staying(given: Pages) -> Pages:
            pages = pool.inside(distinct(given // size))
            event = ledger.event(pool, "free", pages, caller=where)
            return np.concatenate([judge(pool, event, pages) for judge in judges])

        if self._may_wait(tokens):
            ledger.post(tokens, self.feed.once(staying))
            return None
        ledger.settle(wait=True)
        given = on_host(tokens)
        stay = staying(given)
        if not len(stay):
            return None
        free = ~np.isin(given // size, stay)
        if segment:  # SGLang takes the first index of each page, so whole pages are left out
            free = np.repeat(free, size)[: free_index.numel()]
        return free_index[torch.from_numpy(free).to(free_index.device)]

    def around_free_swa(
        self, call_next: Callable[..., Any], allocator: Any, free_index: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Free the SWA pages of these full pages. If this is an eviction, the full pages stay."""
        if hasattr(allocator, "swa_page_ids_group"):
            self._entered_unmap(allocator, free_index, "start_pos" in kwargs)
            self._unmapping += 1
            try:
                return call_next(allocator, free_index, **kwargs)
            finally:
                self._unmapping -= 1
        if hasattr(allocator, "swa_free_group") and in_free_group(allocator):
            return call_next(allocator, free_index, **kwargs)  # it is called again for all of them
        if self._freeing and self._kept is not None:
            size = self.ledger.pools["full"].page_size
            keep = torch.from_numpy(np.isin(on_host(free_index) // size, self._kept))
            free_index = free_index[keep.to(free_index.device)]
        self._entered_swa(free_index)
        try:
            return call_next(allocator, free_index, **kwargs)
        finally:
            self._left_swa()

    def _enter_free_swa(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        pool = self.ledger.pools["full"]
        known = self._freed
        just_freed = known is not None and known[0] is free_index
        if known is not None and just_freed:  # it was read, and its pages are marked as free
            pages = known[1]
        else:
            pages = distinct(on_host(free_index) // pool.page_size)
        self.ledger.settle(wait=True)
        losing = self.ledger.losing_swa = pool.inside(pages)
        partners = pool.partner[losing]
        self.ledger.expected_swa = np.sort(partners[partners != 0])
        if not just_freed:
            self._mark_parted(pool, free_index)

    def _leave_free_swa(self) -> None:
        if self.ledger.losing_swa is not None:
            self.ledger.pools["full"].partner[self.ledger.losing_swa] = 0
            self.ledger.losing_swa = self.ledger.expected_swa = None

    def _post_parted(
        self,
        pool: PoolLedger,
        tokens: torch.Tensor,
        enter: Callable[[Pages], None],
        mapping: torch.Tensor | None = None,
    ) -> None:
        """Mark them as :meth:`_mark_parted` does, and tell the host of them."""
        once = self.feed.once(enter)
        self.ledger.post(tokens, once, mapping, pool.page_size, HELD, unless_free=True)

    def _mark_parted(self, pool: PoolLedger, tokens: torch.Tensor) -> None:
        """These full pages have no SWA page any more. Those that were freed stay free."""
        if self.ledger.shadow is not None:
            shadows.mark(
                self.ledger.shadow, tokens.contiguous(), pool.page_size, HELD, unless_free=True
            )

    def _enter_unmap(self, allocator: Any, free_index: torch.Tensor, segment: bool) -> None:
        """Enter that full pages lose their SWA pages, which are freed now or at a group's end.

        segment: the indices are consecutive tokens of a request, from the beginning of a page on.
        """
        if free_index.numel() == 0:
            return
        pool, mapping = self.ledger.pools["full"], allocator.full_to_swa_index_mapping
        tokens = free_index[:: pool.page_size] if segment else free_index
        alone, where = not self._freeing, caller()

        def enter(words: Pages) -> None:
            theirs, says = words.reshape(2, -1)
            mended = self._unmap(theirs, says, alone, where)
            if mended is not None and not self.ledger.late:
                self._mend(mapping, alone, *mended)

        if self._may_wait(tokens):
            self._post_parted(pool, tokens, enter, mapping)
        else:
            self.ledger.settle(wait=True)
            tokens = tokens.to(torch.int64)
            mapped = mapping[tokens.clamp(0, len(mapping) - 1)]
            enter(
                on_host(torch.cat((tokens, mapped)))
            )  # raises if a finding stops it: then it will not happen
            self._mark_parted(pool, tokens)

    def _unmap(
        self, tokens: Pages, mapped: Pages, alone: bool, where: str
    ) -> tuple[Pages, Pages] | None:
        """``mapped[i]`` is what the mapping says about ``tokens[i]``.

        Returns what it should say of which full pages, if a listener wants it to be mended.
        """
        pool, swa = self.ledger.pools["full"], self.ledger.pools["swa"]
        size = pool.page_size
        theirs = mapped > 0
        pairs = _distinct_pairs(tokens[theirs] // size, mapped[theirs] // size)
        losing = pool.inside(distinct(tokens // size))
        partners = pool.partner[losing]
        self.ledger.losing_swa = losing
        self.ledger.expected_swa = np.sort(partners[partners != 0])
        found, happened = distinct(pairs[1]), self.ledger.late
        try:
            kept = self.ledger.enter(swa, "unmap", found, holds=None, caller=where)
            happened = True
        finally:
            self.ledger.losing_swa = self.ledger.expected_swa = None
            if happened:
                pool.partner[losing] = 0
                swa.partner[swa.inside(found)] = 0
                for full, page in zip(*(side.tolist() for side in pairs), strict=True):
                    self.ledger.parted[page] = (full, alone)
        return None if kept is found else (losing, np.where(np.isin(partners, kept), partners, 0))

    def _mend(self, mapping: torch.Tensor, alone: bool, full: Pages, swa: Pages) -> None:
        """Let SGLang's mapping say that ``swa[i]`` is the SWA page of the full page ``full[i]``."""
        size = self.ledger.pools["full"].page_size
        for page, partner in zip(full.tolist(), swa.tolist(), strict=True):
            tokens = torch.arange(size) + partner * size if partner else torch.zeros(size)
            mapping[page * size : (page + 1) * size] = tokens.to(mapping)
            if partner:
                self.ledger.parted[partner] = (page, alone)

    def after_clear_mapping(self, result: Any, allocator: Any, full: torch.Tensor) -> None:
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

        self._post_parted(pool, full, enter)

    # --- everything at once -------------------------------------------------------------------

    def after_clear(self, result: Any, allocator: Any) -> None:
        pool = self.feed.pools.get(id(allocator))
        if pool is None:
            return
        self.ledger.settle(wait=True)
        pages = pool.held.nonzero()[0]
        self.ledger.enter(pool, "clear", pages, holds=False, caller=caller())
        pool.forget()
        self.ledger.parted.clear()
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


def _distinct_pairs(first: Pages, second: Pages) -> tuple[Pages, Pages]:
    """The pairs (first[i], second[i]), sorted, each once, in a third of np.unique's time.

    An eviction asks for each of its nodes, dozens of times before a prefill.
    """
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return first[new], second[new]
