"""The books of one KV pool: who holds each page now, and who held it last. They are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Pages = np.ndarray[Any, np.dtype[np.int64]]  # page or token indices, 1-D
Flags = np.ndarray[Any, np.dtype[np.bool_]]
DEPTH = 8  # events known of each page
TAILS = 4096  # so many requests' last pages are known
# So few pages are looked at one by one: an operation of numpy costs as much as some ten pages in a
# loop, whatever their number, and a question takes several of them.
FEW = 16
FEW_ENTERED = 8  # so few are entered one by one: each takes six stores
_FIRST = np.ones(1, dtype=np.bool_)


def on_host(indices: torch.Tensor) -> Pages:
    """The values of an index tensor. Waits for its device."""
    found: Pages = indices.detach().cpu().to(torch.int64).numpy()
    return found


def distinct(values: Pages) -> Pages:
    """``values``, sorted, each once. The same as np.unique, in a fraction of its time.

    Most events are of a few pages, and a prefill that evicts makes dozens of them. It may be
    ``values`` itself.
    """
    if len(values) <= FEW:
        few = values.tolist()
        once = sorted(set(few))
        return values if once == few else np.array(once, dtype=values.dtype)
    found = np.sort(values)
    new = found[1:] != found[:-1]
    return found if new.all() else found[np.concatenate((_FIRST, new))]


@dataclass
class PoolLedger:
    """The pages of one pool. ``pages`` includes the reserved page 0.

    The arrays have one entry for each page:
    held: it was handed out and not freed yet.
    ever: it was handed out at least once.
    owner: rid of the last request that it was handed out for, '' if not known.
    position: position of the page's first token in that request, -1 if not known.
    partner: the SWA page of a full page, or the full page of a SWA page; 0 if there is none, -1
        if not known.
    recent: int64 [pages, DEPTH], serial numbers of its last events in any order, -1 for none.

    tails: rid -> the last page of the request's sequence.
    """

    name: str
    pages: int
    page_size: int
    held: Flags = field(init=False)
    ever: Flags = field(init=False)
    owner: np.ndarray[Any, np.dtype[np.object_]] = field(init=False)
    position: Pages = field(init=False)
    partner: Pages = field(init=False)
    recent: Pages = field(init=False)
    tails: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = np.full(self.pages, "", dtype=object)
        self.ever = np.zeros(self.pages, dtype=np.bool_)
        self.recent = np.full((self.pages, DEPTH), -1, dtype=np.int64)
        self._turn = np.zeros(self.pages, dtype=np.int64)
        self.forget()

    def forget(self) -> None:
        """All pages are free again, because the allocator was cleared. Their histories stay."""
        self.held = np.zeros(self.pages, dtype=np.bool_)
        self.position = np.full(self.pages, -1, dtype=np.int64)
        self.partner = np.zeros(self.pages, dtype=np.int64)

    def enter(
        self,
        pages: Pages,
        serial: int,
        holds: bool | None,
        request: str = "",
        positions: Pages | list[int] | None = None,
    ) -> None:
        """Enter the event ``serial`` of these pages. Those that are not in the pool are skipped.

        holds: whether the pages are held after it, None for no change. positions: the position of
        each page's first token in the request, as many as there are pages.

        Raises ValueError if there are not as many positions as pages, all of them in the pool.
        """
        if len(pages) <= FEW_ENTERED:
            self._enter_few(pages.tolist(), serial, holds, request, positions)
            return
        inside = self.inside(pages)
        known: Any = -1 if positions is None or len(inside) != len(pages) else positions
        self.recent[inside, self._turn[inside] % DEPTH] = serial
        self._turn[inside] += 1
        if holds is None:
            return
        self.held[inside] = holds
        if holds:
            if request and len(pages):
                self.ends_in(request, int(pages[-1]))
            self.ever[inside] = True
            self.owner[inside] = request
            self.position[inside] = known
            self.partner[inside] = 0

    def _enter_few(
        self,
        pages: list[int],
        serial: int,
        holds: bool | None,
        request: str,
        positions: Pages | list[int] | None,
    ) -> None:
        """The same as :meth:`enter`, page by page.

        tests/ledger/test_few_pages.py holds the two against each other.
        """
        ends, end = pages[-1:], self.pages
        if pages and not (min(pages) > 0 and max(pages) < end):
            pages, positions = [p for p in pages if 0 < p < end], None
        for page in set(pages):  # one that is given twice has one event
            turn = int(self._turn[page])
            self.recent[page, turn % DEPTH] = serial
            self._turn[page] = turn + 1
            if holds is not None:
                self.held[page] = holds
        if not holds:
            return
        if request and ends:
            self.ends_in(request, ends[0])
        known = [-1] * len(pages) if positions is None else positions
        for page, position in zip(pages, known, strict=True):
            self.ever[page] = True
            self.owner[page] = request
            self.position[page] = position
            self.partner[page] = 0

    def are_new(self, pages: Pages) -> bool:
        """True if all of these are pages of this pool that are not held, each given once."""
        if not len(pages) or pages.min() <= 0 or pages.max() >= self.pages:
            return False
        return not self.held[pages].any() and len(distinct(pages)) == len(pages)

    def enter_each(
        self, pages: Pages, serial: int, requests: Sequence[str], positions: Pages
    ) -> None:
        """The same as :meth:`enter` of each page alone, with the next serial number each.

        The pages are new (:meth:`are_new`), and each is handed out to the request at its place.
        """
        turns = self._turn[pages]
        self.recent[pages, turns % DEPTH] = np.arange(serial, serial + len(pages))
        self._turn[pages] = turns + 1
        self.held[pages] = self.ever[pages] = True
        self.owner[pages] = requests
        self.position[pages] = positions
        self.partner[pages] = 0
        for request, page in zip(requests, pages.tolist(), strict=True):
            if request:
                self.ends_in(request, page)

    def inside(self, pages: Pages) -> Pages:
        """Selects from ``pages`` the ones in this pool, without the reserved page 0.

        It may be ``pages`` itself.
        """
        if 0 < len(pages) <= FEW:
            few = pages.tolist()
            if min(few) > 0 and max(few) < self.pages:
                return pages
        return pages[(pages > 0) & (pages < self.pages)]

    def owners(self, pages: Pages) -> set[str]:
        """The requests that these pages were handed out for last, '' for one that is not known."""
        if len(pages) <= FEW:
            end, owner = self.pages, self.owner
            return {owner[page] for page in pages.tolist() if 0 < page < end}
        return set(self.owner[self.inside(pages)])

    def outside(self, tokens: Pages) -> Pages:
        """The pages, each once, of those of these token indices that this pool does not have."""
        # Negative numbers are large ones as unsigned numbers. One pass over sound ones.
        limit = self.pages * self.page_size
        if not len(tokens) or tokens.view(np.uint64).max() < limit:
            return tokens[:0]
        return np.unique(tokens[(tokens < 0) | (tokens >= limit)] // self.page_size)

    def not_held(self, pages: Pages) -> Pages:
        """Selects from ``pages`` the ones that this pool does not hold, in the order given."""
        if not len(pages):
            return pages
        if self.held.take(pages, mode="clip").all() and pages.max() < len(self.held):
            return pages[:0]  # take() clips negative pages to page 0, which is never held
        inside = (pages > 0) & (pages < len(self.held))
        held = np.zeros(len(pages), dtype=np.bool_)
        held[inside] = self.held[pages[inside]]
        return pages[~held]

    def pair(self, full: Pages, swa_pool: PoolLedger, swa: Pages) -> None:
        """``swa[i]`` is the SWA page of this pool's page ``full[i]``. Bad indices are skipped."""
        sound = (full > 0) & (full < self.pages) & (swa > 0) & (swa < swa_pool.pages)
        if not sound.all():
            full, swa = full[sound], swa[sound]
        before = swa_pool.partner[swa]  # a SWA page that goes over to another full page
        moved = (before > 0) & (before != full)
        if moved.any():
            left = before[moved]
            self.partner[left[self.partner[left] == swa[moved]]] = 0
        self.partner[full] = swa
        swa_pool.partner[swa] = full

    def ends_in(self, request: str, page: int) -> None:
        """Note the last page of a request's sequence. The latest ``TAILS`` requests are kept.

        Of a page that the pool does not have, which a broken allocator gave, nothing is noted.
        """
        self.tails.pop(request, None)
        if not 0 < page < self.pages:
            return
        self.tails[request] = page
        if len(self.tails) > TAILS:
            del self.tails[next(iter(self.tails))]


@dataclass(frozen=True)
class Pairs:
    """Full pages, and the SWA page that belongs to each. int64 [n] each.

    given: by the ledger, 0 for none, -1 if not known. mapped: by SGLang's mapping, where that is
    about each single page; None where all of them are freed together.
    """

    full: Pages
    given: Pages
    mapped: Pages | None = None

    @property
    def swa(self) -> Pages:
        """The SWA pages by the ledger, sorted. If one of them is not known, -1 is the first."""
        found: Pages = np.sort(self.given[self.given != 0])
        return found

    def of(self, page: int) -> tuple[int, int]:
        """(given, mapped) of one of these full pages; (0, 0) if it is none, or not known alone."""
        at = (self.full == page).nonzero()[0][:1]
        if self.mapped is None or not len(at):
            return 0, 0
        return int(self.given[at[0]]), int(self.mapped[at[0]])
