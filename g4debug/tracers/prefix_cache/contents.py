"""Remembers the contents of the pages of the full pool that were handed to the prefix cache.

The entry of a page says from which tokens its KV was computed (:mod:`.digests`), which request
handed it over, and in which step. It is made when a request hands the page over, and forgotten when
the page is freed or handed out anew. A node of the prefix cache that is split, or that loses its
SWA pages, needs no entry of its own: its pages hold the same KV as before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from g4debug.ledger.books import FEW, Flags, Pages
from g4debug.tracers.prefix_cache.digests import Digests


class Entry(NamedTuple):
    """Tells who handed a page over.

    request: '' if it is not known. step: the step in which it did. column: the page is the
    request's page number ``column``, from 0 on.
    """

    request: str
    step: int
    column: int


class Contents:
    """``digest``: uint64 [pages], 0 where the contents of a page are not known."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.digest: Digests = np.zeros(pages, dtype=np.uint64)
        self.step = np.full(pages, -1, dtype=np.int64)
        self.column = np.full(pages, -1, dtype=np.int64)
        self.request: np.ndarray[Any, np.dtype[np.object_]] = np.full(pages, "", dtype=object)

    def put(self, pages: Pages, digests: Digests, request: str, step: int) -> None:
        """Note the digests of these pages of the pool. The first request to say so is kept."""
        new = self.digest[pages] != digests
        at = pages[new]
        self.digest[at] = digests[new]
        self.request[at] = request
        self.step[at] = step
        self.column[at] = new.nonzero()[0]

    def forget(self, pages: Pages) -> None:
        if len(pages) > FEW:
            self.digest[self.inside(pages)] = 0
            return
        for page in pages.tolist():
            if 0 < page < self.pages:
                self.digest[page] = 0

    def clear(self) -> None:
        self.digest[:] = 0

    def inside(self, pages: Pages) -> Pages:
        return pages[self.are_pages(pages)]

    def are_pages(self, pages: Pages) -> Flags:
        found: Flags = (pages > 0) & (pages < self.pages)
        return found

    def entry(self, page: int) -> Entry | None:
        if not 0 <= page < self.pages or not self.digest[page]:
            return None
        return Entry(str(self.request[page]), int(self.step[page]), int(self.column[page]))
