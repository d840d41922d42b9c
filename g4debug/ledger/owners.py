"""Owners: the row to which each page of the full pool was handed out, on the device, for kernels.

A request is known by its row of ``req_to_token``, and a page by the column of that row that it was
handed out for. A page stays in its column for as long as it is held: the prefix cache is a tree of
prefixes, so whoever gets the page lent has it in the same column. So a row is wrong that names

* a page that was handed out for another column, whosever it is: its own page of another place,
  twice or in a wrong order, too;
* a page that was handed out to another row, but where the prefix cache *lent* it. When a request is
  admitted, the cache lends it the pages that it has for the request's first tokens. Pages that the
  request gives to the cache later stay its own, but for those that the cache had already: the row
  gets the cache's pages in their place, and the request's are freed.

A kernel can read these tensors:

* ``pages``: int64 [pages + 1], :func:`place` of the row and column that a page was handed out to; 0
  if it is not known. The last word is a spare one.
* ``protected``: int64 [rows of ``req_to_token``], :func:`both` of how many tokens of each row the
  prefix cache lent, and of how many it holds; both are ``EVERYTHING`` where that is not known.

Where there is doubt, it is not known: if the allocation cannot be matched with the batch that is
being prepared, if a request belongs to a session, or if this SGLang does not tell how many tokens
of a request the prefix cache holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl

from g4debug import launching
from g4debug.findings.book_words import EVERYTHING as EVERYTHING
from g4debug.findings.book_words import HIGH as HIGH
from g4debug.hooking import req_kv
from g4debug.ledger.doubts import Doubts

logger = logging.getLogger("g4debug")
DOUBTS = 8  # owners are given up at so many wrong suspicions that are not forgotten yet
BLOCK = 256


def place(row: Any, column: Any) -> Any:
    """The word for a page that was handed out for one column of a row; or those of several."""
    return row * HIGH + column + 1


def both(lent: int, cached: int) -> int:
    """The word for a row: how many of its tokens the prefix cache lent, and how many it holds."""
    return lent * HIGH + cached


@launching.kernel(tensors=3, numbers=3)
def _give_kernel(pages, indices, plan, count, page_size, last, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    offset = tl.load(plan + i, mask=inside, other=0)
    word = tl.load(plan + count + i, mask=inside, other=0)
    token = tl.load(indices + offset, mask=inside, other=0).to(tl.int64)
    page = token // page_size
    tl.store(pages + page, word, mask=inside & (page > 0) & (page < last))


@launching.kernel(tensors=4, numbers=3)
def _lend_kernel(
    pages, protected, req_to_token, plan, count, page_size, stride,
    LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(plan + i)
    begin = tl.load(plan + count + i)
    end = tl.load(plan + 2 * count + i)
    first, stop = begin // page_size, end // page_size
    own = stop
    start = first
    while (start < stop) & (own == stop):
        column = start + tl.arange(0, BLOCK)
        inside = column < stop
        cells = req_to_token + row * stride + column * page_size
        page = tl.load(cells, mask=inside, other=0).to(tl.int64) // page_size
        exists = inside & (page > 0) & (page < LAST)
        given = tl.load(pages + page, mask=exists, other=0)
        own = tl.min(tl.where(exists & (given >> 32 == row), column, stop), axis=0)
        start += BLOCK
    word = tl.load(protected + row)
    lent = tl.where(own > first, tl.where(own == stop, end, own * page_size), word >> 32)
    tl.store(protected + row, (lent << 32) + end)


_launch = launching.Launcher(_give_kernel)
_launch_lend = launching.Launcher(_lend_kernel)


def launch_lend(
    pages: torch.Tensor,
    protected: torch.Tensor,
    req_to_token: torch.Tensor,
    more: list[tuple[int, int, int]],
    page_size: int,
) -> None:
    """The same as :func:`reference_lend`, in one launch."""
    plan = torch.from_numpy(np.array(more, dtype=np.int64).T.copy())
    plan = plan.to(pages.device, non_blocking=True)
    _launch_lend(
        (len(more), 1, 1),
        (pages, protected, req_to_token, plan),
        (len(more), page_size, req_to_token.stride(0)),
        (pages.numel() - 1, BLOCK),
    )


def reference_lend(
    pages: torch.Tensor,
    protected: torch.Tensor,
    req_to_token: torch.Tensor,
    more: list[tuple[int, int, int]],
    page_size: int,
) -> None:
    """Set the words of rows of which the prefix cache holds more now, see ``Owners.protect``.

    pages, protected: see :class:`Owners`. more: (row, begin, end): the tokens from ``begin`` to
    ``end`` - 1 are new. Up to the first page that was handed out to the row itself, the cache had
    them already.
    """
    for row, begin, end in more:
        first = begin // page_size
        cells = req_to_token[row, first * page_size : end : page_size]
        page = cells.to(torch.int64) // page_size
        exists = (page > 0) & (page < pages.numel() - 1)
        given = pages[torch.where(exists, page, 0)]
        own = (exists & (given // HIGH == row)).nonzero().flatten()[:1].tolist()
        lent = int(protected[row]) // HIGH
        if not own or own[0] > 0:
            lent = (first + own[0]) * page_size if own else end
        protected[row] = both(lent, end)


class Owners:
    """The owners of the full pool's pages. ``given_up`` says why nothing is told any more."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        device: torch.device | str,
        limit: Callable[[str, str], None],
        doubts: Doubts,
    ) -> None:
        self.pages = torch.zeros(pages + 1, dtype=torch.int64, device=device)
        self.page_size = page_size
        self.protected: torch.Tensor | None = None
        self.given_up = ""
        self._limit = limit  # tells the status which judgement is missing, and why
        # For each row: the request, and the number of tokens, for which ``protected`` holds.
        self._known: list[tuple[str, int]] = []
        self._doubts = doubts

    def prepare(self, rows: int) -> None:
        """Make room for the rows of ``req_to_token``. Call it before a CUDA graph is captured."""
        if self.protected is None:
            self._known = [("", EVERYTHING)] * rows
            self.protected = torch.full(
                (rows,),
                both(EVERYTHING, EVERYTHING),
                dtype=torch.int64,
                device=self.pages.device,
            )

    def known(self, rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(pages, protected) for a ``req_to_token`` of so many rows; (None, None) for another."""
        if self.protected is None or len(self._known) != rows:
            return None, None
        return self.pages, self.protected

    def give(
        self, indices: torch.Tensor, offsets: list[int], rows: list[int], columns: list[int]
    ) -> None:
        """Pages were handed out: the page of ``indices[offsets[i]]`` for ``columns[i]`` of a row.

        indices: int32/int64 [n], token indices of the full pool, contiguous. rows: 0 for a row that
        is not known. Never waits.
        """
        if self.given_up or not offsets:
            return
        # By way of an array: it takes half the time that torch needs to read two lists.
        read = np.array((offsets, rows, columns), dtype=np.int64)
        known = read[1] > 0
        read[1] = np.where(known, place(read[1], read[2]), 0)
        plan = torch.from_numpy(read[:2])
        last = self.pages.numel() - 1
        if not indices.is_cuda:
            page = indices[plan[0]].to(torch.int64) // self.page_size
            sound = (page > 0) & (page < last)
            self.pages[page[sound]] = plan[1][sound]
            return
        count = len(offsets)
        plan = plan.to(indices.device, non_blocking=True)
        _launch(
            (-(-count // BLOCK), 1, 1),
            (self.pages, indices, plan),
            (count, self.page_size, last),
            (BLOCK,),
        )

    def protect(self, requests: list[Any], req_to_token: torch.Tensor | None = None) -> None:
        """Before a forward: learn how much of these requests' rows the prefix cache owns.

        If a request is new in its row, the cache has lent it all tokens that it holds of the row.
        If the cache holds more tokens later, the request has handed over its own pages. But where
        the cache had a page already, ``req_to_token`` now names that page, which is lent. Without
        that tensor, all tokens count as lent.
        """
        if self.protected is None or self.given_up:
            return
        known, changed, more = self._known, {}, []
        rows = req_kv.column(requests, req_kv.ROW)
        held = _cached_tokens(requests)
        for request, row, cached in zip(requests, rows, held, strict=True):
            if not 0 < row < len(known):
                continue
            rid, before = known[row]
            if before == cached and rid == request.rid:
                continue
            known[row] = request.rid, cached
            grows = rid == request.rid and before < cached < EVERYTHING
            if grows and req_to_token is not None and cached % self.page_size == 0:
                more.append((row, before, cached))
            else:
                changed[row] = both(cached, cached)
        if changed:
            at = torch.from_numpy(np.array((list(changed), list(changed.values())), dtype=np.int64))
            at = at.to(self.protected.device, non_blocking=True)
            self.protected[at[0]] = at[1]
        if more and req_to_token is not None:
            self._lend(req_to_token, more)

    def _lend(self, req_to_token: torch.Tensor, more: list[tuple[int, int, int]]) -> None:
        """The prefix cache holds the tokens ``begin`` to ``end`` - 1 of a row now, too.

        more: (row, begin, end) of each.
        """
        assert self.protected is not None
        (launch_lend if self.pages.is_cuda else reference_lend)(
            self.pages, self.protected, req_to_token, more, self.page_size
        )

    def lend(self, row: int, tokens: int) -> None:
        """The prefix cache has lent so many tokens of a row, as it says itself."""
        if self.protected is not None and 0 < row < len(self._known):
            self.protected[row : row + 1].fill_(both(tokens, tokens))

    def doubt(self, page: int, why: str) -> None:
        """A suspicion about a page was not confirmed by SGLang's own tables: forget its owner."""
        if 0 <= page < self.pages.numel():
            self.pages[page : page + 1].fill_(0)
        logger.warning(
            "g4debug: full page %d seemed to be in the row of a request that it does not belong "
            "to, but SGLang's own tables do not confirm it (%s), so nothing is reported",
            page,
            why,
        )
        count = self._doubts.add()
        if count >= DOUBTS:
            self.give_up(f"{count} suspicions were not confirmed by SGLang's own tables")

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
        n if isinstance(n, int) and n >= 0 and getattr(request, "session", None) is None
        else EVERYTHING
        for request, n in zip(requests, known, strict=True)
    ]  # fmt: skip


def cached_tokens(request: Any) -> int:
    """How many of a request's first tokens may lie in other requests' pages."""
    return _cached_tokens((request,))[0]
