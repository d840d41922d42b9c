"""The readers of pages that are not their own: running requests that read the prefix cache.

A page of the prefix cache has no owner that runs, but the requests that it was lent to read it in
each of their forwards. It may be freed when none of them runs any more; until then SGLang locks it.
So a full page that is freed while a running request's row of ``req_to_token`` names it is wrong,
whatever the counts say (upstream #29352: no count was wrong, and nothing ever crashed).

What each request reads is copied from its row when it is prefilled, and again when the prefill's
result was processed, because the prefix cache then takes the request's own pages over. On a GPU
that copy reaches the host later, in the order of everything else that the ledger posts. It is only
where to look: before anything is told, the row itself must still name the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from g4debug.hooking import req_kv
from g4debug.ledger.books import Pages, on_host
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.owners import EVERYTHING, cached_tokens


@dataclass(slots=True)
class Reading:
    """The pages of the prefix cache that one request reads.

    row: of ``req_to_token``. tokens: how many of its first tokens lie there. pages: of the full
    pool, int64, column by column; none until they have reached the host. told: the pages that were
    reported.
    """

    rid: str
    row: int
    tokens: int
    pages: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    told: set[int] = field(default_factory=set)


class Readers:
    """The running requests' prefixes: ``reading``, by rid. ``isolate`` is the context's."""

    def __init__(
        self, ledger: Ledger, isolate: Callable[[Callable[..., None]], Callable[..., Any]]
    ) -> None:
        self._ledger = ledger
        self._entered = isolate(self._enter)
        self.reading: dict[str, Reading] = {}
        # By how many requests each full page is read.
        self._readers: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(0, dtype=np.int32)

    def learn(self, requests: Sequence[Any], req_to_token: torch.Tensor) -> None:
        """Note what these requests read now. Never waits for the device.

        req_to_token: int32 [rows, tokens]. A request that has no row, is finished, or does not say
        how much of it is the prefix cache's, is left out.
        """
        pool = self._ledger.pools.get("full")
        if pool is None or self._ledger.broken:
            return
        if len(self._readers) != pool.pages:
            self.reading.clear()
            self._readers = np.zeros(pool.pages, dtype=np.int32)
        new: list[Reading] = []
        parts: list[torch.Tensor] = []
        for request in requests:
            rid, row, tokens = str(request.rid), req_kv.row(request), cached_tokens(request)
            known = self.reading.get(rid)
            if known is not None and (known.row, known.tokens) == (row, tokens):
                continue
            self.forget(rid)
            if row < 0 or not 0 < tokens < EVERYTHING or request.finished():
                continue
            self.reading[rid] = Reading(rid, row, tokens)
            new.append(self.reading[rid])
            parts.append(req_to_token[row, : tokens : pool.page_size])
        if new:
            together = torch.cat(parts)
            self._ledger.post(together, lambda words: self._entered(new, words, pool.page_size))

    def _enter(self, new: list[Reading], words: Pages, page_size: int) -> None:
        ends = np.cumsum([-(-reading.tokens // page_size) for reading in new])
        for reading, pages in zip(new, np.split(words // page_size, ends[:-1]), strict=True):
            if self.reading.get(reading.rid) is reading:  # it was not forgotten since
                reading.pages = pages
                np.add.at(self._readers, self._inside(pages), 1)

    def _inside(self, pages: Pages) -> Pages:
        return pages[(pages > 0) & (pages < len(self._readers))]

    def forget(self, rid: str) -> None:
        """The request reads nothing any more."""
        reading = self.reading.pop(rid, None)
        if reading is not None:
            np.subtract.at(self._readers, self._inside(reading.pages), 1)

    def of(self, pages: Pages) -> list[tuple[Reading, Pages]]:
        """The requests that seem to read these full pages. All must be pages of the pool."""
        if not len(self._readers) or not len(pages) or not self._readers[pages].any():
            return []
        known = self.reading.values()
        found = [(reading, pages[np.isin(pages, reading.pages)]) for reading in known]
        return [(reading, theirs) for reading, theirs in found if len(theirs)]


def columns_of(reading: Reading, pages: Pages, req_to_token: torch.Tensor, page_size: int) -> Pages:
    """The columns of the request's row that name one of these pages, of those it read. Waits."""
    columns = np.isin(reading.pages, pages).nonzero()[0]
    at = torch.from_numpy(columns * page_size).to(req_to_token.device)
    named = on_host(req_to_token[reading.row, at]) // page_size
    found: Pages = columns[named == reading.pages[columns]]
    return found
