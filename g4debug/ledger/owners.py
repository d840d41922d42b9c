"""Owners: for which request each page of the full pool was handed out, on the device, for kernels.

A request is known by its row of ``req_to_token``. Of a request's tokens, the first
``cache_protected_len`` lie in pages of the prefix cache, which may be anybody's. All others lie in
pages that were handed out to that request itself. So a row that names another request's page beyond
that length is wrong. This is what a kernel can see here:

* ``pages``: int32 [pages + 1], the row of ``req_to_token`` that a page was handed out to; 0 if it
  is not known. The last word is a spare one.
* ``protected``: int32 [rows of ``req_to_token``], how many tokens of each row are the prefix
  cache's; ``EVERYTHING`` where that is not known.

Where there is doubt, it is not known: if the allocation cannot be matched with the batch that is
being prepared, if a request belongs to a session, or if this SGLang does not say how much of a
request is the prefix cache's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from g4debug import launching
from g4debug.hooking import req_kv

logger = logging.getLogger("g4debug")
EVERYTHING = 2**31 - 1
DOUBTS = 8  # after so many suspicions that were wrong, owners are given up
BLOCK = 256


@launching.kernel(tensors=3, numbers=3)
def _give_kernel(pages, indices, plan, count, page_size, last, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    offset = tl.load(plan + i, mask=inside, other=0)
    row = tl.load(plan + count + i, mask=inside, other=0).to(tl.int32)
    token = tl.load(indices + offset, mask=inside, other=0).to(tl.int64)
    page = token // page_size
    tl.store(pages + page, row, mask=inside & (page > 0) & (page < last))


_launch = launching.Launcher(_give_kernel)


class Owners:
    """The owners of the full pool's pages. ``given_up`` says why nothing is told any more."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        device: torch.device | str,
        limit: Callable[[str, str], None],
    ) -> None:
        self.pages = torch.zeros(pages + 1, dtype=torch.int32, device=device)
        self.page_size = page_size
        self.protected: torch.Tensor | None = None
        self.given_up = ""
        self._limit = limit  # tells the status what is not judged, and why
        self._known: list[int] = []  # what ``protected`` has, on the host
        self._doubts = 0

    def prepare(self, rows: int) -> None:
        """Make room for the rows of ``req_to_token``. Call it before a CUDA graph is captured."""
        if self.protected is None:
            self._known = [EVERYTHING] * rows
            self.protected = torch.full(
                (rows,), EVERYTHING, dtype=torch.int32, device=self.pages.device
            )

    def known(self, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(pages, protected) for a ``req_to_token`` of so many rows; (None, None) for another."""
        if self.protected is None or len(self._known) != rows:
            return None, None
        return self.pages, self.protected

    def give(self, indices: torch.Tensor, offsets: list[int], rows: list[int]) -> None:
        """Pages were handed out: the page of ``indices[offsets[i]]`` to the row ``rows[i]``.

        indices: int32/int64 [n], token indices of the full pool, contiguous. Never waits.
        """
        if self.given_up or not offsets:
            return
        # By way of an array: it takes half the time that torch needs to read two lists.
        plan = torch.from_numpy(np.array((offsets, rows), dtype=np.int64))
        last = self.pages.numel() - 1
        if not indices.is_cuda:
            page = indices[plan[0]].to(torch.int64) // self.page_size
            sound = (page > 0) & (page < last)
            self.pages[page[sound]] = plan[1][sound].to(torch.int32)
            return
        count = len(offsets)
        plan = plan.to(indices.device, non_blocking=True)
        _launch(
            (-(-count // BLOCK), 1, 1),
            (self.pages, indices, plan),
            (count, self.page_size, last),
            (BLOCK,),
        )

    def protect(self, requests: list[Any]) -> None:
        """Before a forward: learn how much of these requests' rows is the prefix cache's."""
        if self.protected is None or self.given_up:
            return
        known, changed = self._known, {}
        rows = req_kv.column(requests, req_kv.ROW)
        for row, begin in zip(rows, _cached_tokens(requests), strict=True):
            if 0 < row < len(known) and known[row] != begin:
                known[row] = changed[row] = begin
        if changed:
            at = torch.from_numpy(np.array((list(changed), list(changed.values())), dtype=np.int64))
            at = at.to(self.protected.device, non_blocking=True)
            self.protected[at[0]] = at[1].to(torch.int32)

    def doubt(self, page: int, why: str) -> None:
        """A suspicion about a page was not confirmed by SGLang's own tables: forget its owner."""
        if 0 <= page < self.pages.numel():
            self.pages[page : page + 1].fill_(0)
        self._doubts += 1
        logger.warning(
            "g4debug: full page %d seemed to be in the row of a request that it does not belong "
            "to, but SGLang's own tables do not confirm it (%s), so nothing is reported",
            page,
            why,
        )
        if self._doubts >= DOUBTS:
            self.give_up(f"{self._doubts} suspicions were not confirmed by SGLang's own tables")

    def give_up(self, why: str) -> None:
        """Tell nothing any more, the kernels included."""
        if not self.given_up:
            self.given_up = why
            self.pages.fill_(0)
            self._limit("not whose page a row of req_to_token names", why)


def _cached_tokens(requests: Sequence[Any]) -> list[int]:
    """:func:`cached_tokens` of each request. It is asked in every step."""
    known = req_kv.values(requests, req_kv.PROTECTED)
    return [
        n if isinstance(n, int) and getattr(request, "session", None) is None else EVERYTHING
        for request, n in zip(requests, known, strict=True)
    ]


def cached_tokens(request: Any) -> int:
    """How many of a request's first tokens may lie in other requests' pages."""
    return _cached_tokens((request,))[0]
