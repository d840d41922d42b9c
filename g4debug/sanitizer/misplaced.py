"""Asks SGLang's own structures whether a row of ``req_to_token`` names a page where it may not.

A kernel suspects it from what the ledger knows (:mod:`g4debug.ledger.owners`). Each of these
proves it, and only the last of them needs the ledger:

* the prefix cache has other pages for the request's first tokens;
* the row names the page twice;
* the page is free, or the prefix cache holds it, which lent it to nobody in this place;
* another request's row names the page, too, where it was handed out to that one;
* the page was handed out for another place, or to another request, and nothing that the allocator
  did was missed.

If the prefix cache has the very page for these tokens, the row is right, and the request was lent
it: then that is learned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from g4debug.hooking import req_kv
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.owners import EVERYTHING, cached_tokens
from g4debug.sanitizer.confirm import GIVEN_UP, Unconfirmed


@dataclass(frozen=True)
class Misplaced:
    """The evidence in SGLang's structures for a cell with a page that does not belong there.

    row: the row of ``req_to_token``, and rid its request. column, page: the cell, and what it has,
    of the full pool. owner: rid of the request that the page was handed out to, '' if that is not
    known; owner_row and owner_column: the row that names it by right, -1 if none does. own: the
    page that belongs there, -1 if that is not known. proof: what makes it certain, in words.
    """

    row: int
    rid: str
    column: int
    page: int
    owner: str
    owner_row: int
    owner_column: int
    own: int
    proof: str

    @property
    def is_its_own(self) -> bool:
        """True if the request names a page of its own, only not where it belongs."""
        return bool(self.owner) and self.owner == self.rid


def misplaced(
    ledger: Ledger | None, row: int, token: int, page: int, rid: str, rows: torch.Tensor
) -> Misplaced:
    """Prove what is wrong with the page that a row names for a token. May wait for the device.

    row: of ``req_to_token``, which is ``rows``. rid: its request. page: of the full pool. Raises
    Unconfirmed if nothing is proven.
    """
    pool = ledger.pools.get("full") if ledger is not None else None
    if ledger is None or pool is None or ledger.owners is None or ledger.broken:
        raise Unconfirmed(GIVEN_UP, page)
    size = pool.page_size
    column = token // size
    at = column * size
    if not 0 < page < pool.pages or int(rows[row, at]) // size != page:
        raise Unconfirmed(f"row {row} of req_to_token does not name it any more", page)
    ledger.settle(wait=True)
    request = ledger.requests.get(rid)
    if request is None or req_kv.row(request) != row:
        raise Unconfirmed(f"the request of row {row} is not known", page)
    cached = cached_tokens(request)
    if cached == EVERYTHING:
        raise Unconfirmed(f"it is not known how much of request {rid} the prefix cache holds", page)
    allocated = req_kv.allocated(request)
    case = _Case(ledger, pool, request, row, column, page, rid, rows, cached, allocated)
    if at >= allocated:
        return case.found(f"the request has {allocated} tokens, so token {at} is none of them")
    return case.proven()


@dataclass(frozen=True)
class _Case:
    ledger: Ledger
    pool: PoolLedger
    request: object
    row: int
    column: int
    page: int
    rid: str
    rows: torch.Tensor
    cached: int
    allocated: int

    def proven(self) -> Misplaced:
        size, page = self.pool.page_size, self.page
        holders = self.ledger.holders
        asks = holders is not None and holders.scheduler is not None
        path = None
        if holders is not None and asks and self.column * size < self.cached:
            path = holders.path(self.request)
        if path is not None and self.column < len(path):
            right = int(path[self.column])
            if right != page:
                proof = f"the prefix cache has page {right} for these tokens"
                return self.found(proof, right)
            if self.ledger.owners is not None:
                self.ledger.owners.lend(self.row, self.cached)
            raise Unconfirmed("the prefix cache has the same page there", page, harmless=True)
        mine = self.rows[self.row, : self.allocated : size] // size
        twice = [c for c in (mine == page).nonzero().flatten().tolist() if c != self.column]
        if twice:
            return self.found(f"the row names it in column {twice[0]}, too")
        full = np.array([page], dtype=np.int64)
        if holders is not None:
            if holders.is_given_back("full", full).any():
                return self.found("the page is free")
            if asks and self.column * size >= self.cached and np.isin(full, holders.cached()).any():
                return self.found("the prefix cache holds the page, and did not lend it here")
        if self.column * size >= self.cached and self._is_in_the_owners_row():
            return self.found("")
        if self.column * size < self.cached:
            raise Unconfirmed(f"token {self.column * size} lies in the prefix cache", page)
        position = self.pool.position[page]
        if self._owner() == self.rid and position == self.column * size:
            raise Unconfirmed("the page was handed out to this request for this place", page)
        known = self.pool.held[page] and self._owner() and position >= 0
        if known and self._own() > 0 and not self.ledger.missed("full"):
            return self.found("nothing that the allocator did was missed")
        raise Unconfirmed(self._why_not(), page)

    def _own(self) -> int:
        """The page that was handed out for these tokens and is still held; -1 if none is known."""
        pool, at = self.pool, self.column * self.pool.page_size
        own = ((pool.owner == self.rid) & (pool.position == at) & pool.held).nonzero()[0]
        own = own[own != self.page]
        return int(own[-1]) if len(own) else -1

    def _is_in_the_owners_row(self) -> bool:
        """True if another live request's own row names the page, where that was handed out."""
        return self._owners_cell() is not None and self._owner() != self.rid

    def _owner(self) -> str:
        return str(self.pool.owner[self.page])

    def _owners_cell(self) -> tuple[int, int] | None:
        holder = self.ledger.requests.get(self._owner())
        token = int(self.pool.position[self.page])
        if holder is None or token < 0 or token >= req_kv.allocated(holder):
            return None
        row = req_kv.row(holder)
        if not 0 < row < len(self.rows):
            return None
        if int(self.rows[row, token]) // self.pool.page_size != self.page:
            return None
        return row, token // self.pool.page_size

    def found(self, proof: str, right: int = -1) -> Misplaced:
        held = bool(self.pool.held[self.page])
        owner = self._owner() if held else ""
        row, column = self._owners_cell() or (-1, -1) if held else (-1, -1)
        own = right if right > 0 else self._own()
        return Misplaced(self.row, self.rid, self.column, self.page, owner, row, column, own, proof)

    def _why_not(self) -> str:
        owner = self._owner()
        if not owner or owner == self.rid:
            return f"page {self.page} is not known to be another request's"
        return f"no row of request {owner} names page {self.page}"
