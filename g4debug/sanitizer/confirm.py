"""Asks SGLang's own structures whether a kernel's record is true.

A finding that rests on ``req_to_token``, or on the numbers themselves, needs no confirmation: both
are SGLang's. A finding that rests on the page ledger, which is ours and may be wrong, is confirmed
here by the free lists, the full-to-SWA mapping and the rows of the requests. If a device is lost,
they cannot be asked any more. Then the kernel is believed, because the server is dead anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from g4debug.ledger.holders import Holders
    from g4debug.ledger.ledger import Ledger

GIVEN_UP = "the page ledger was given up"


class Unconfirmed(Exception):
    """Why something is not reported.

    page: the page of the full pool in question; -1 if it is not known. harmless: the ledger need
    not be wrong.
    """

    def __init__(self, why: str, page: int = -1, harmless: bool = False) -> None:
        super().__init__(why)
        self.page, self.harmless = page, harmless


@dataclass(frozen=True)
class Question:
    """Something that a kernel saw of a page of the full pool. The methods raise Unconfirmed.

    request: the row of ``req_to_token`` that names the page. step: as in ``trap_buffer.Record``.
    """

    ledger: Ledger
    holders: Holders
    page: int
    request: int
    step: int

    @property
    def full(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([self.page], dtype=np.int64)

    def is_served(self) -> None:
        """Is the request still there? If not, its pages are free by right by now."""
        # With a snapshot, the requests that had left are known, see forward_snapshots.py.
        live = self.step < 0 and self.holders.scheduler is not None
        if live and not self.holders.is_served(self.request, self.ledger.requests.values()):
            raise Unconfirmed("its request has ended since then", self.page, harmless=True)

    def is_free(self) -> None:
        """Is the page free, or was it when the forward was launched?"""
        holders, full = self.holders, self.full
        if holders.is_given_back("full", full).any():
            return
        if self.step >= 0 and self._is_named_twice():
            return  # it was free then, and has a new owner now
        raise Unconfirmed(f"full page {self.page} is not in SGLang's free list", self.page)

    def _is_named_twice(self) -> bool:
        holders = self.holders
        if holders.scheduler is None:
            return True
        cells, maybe = holders.in_rows(holders.rows(self.ledger.requests.values()))
        return int((cells == self.page).sum()) + int((maybe == self.page).sum()) > 1

    def is_mapped_elsewhere(self, seen: int, mapped: int, given: int, slot: int = -1) -> None:
        """Does the mapping say something else than the kernel saw, or is the mapping wrong?

        seen, mapped: the page or location that the kernel saw, and the one in the mapping. given:
        the SWA page that was handed out together with the page. slot: a slot of the full pool in
        the page, to ask about it alone; -1 to ask about the whole page.
        """
        # Since the launch, the page may have left the window, and then it has no SWA page any more.
        if mapped != seen and (mapped > 0 or self.step < 0):
            return
        holders, requests = self.holders, self.ledger.requests.values()
        given_page = np.array([given], dtype=np.int64)
        if holders.scheduler is None or holders.mapping_contradicts(
            self.full, given_page, requests
        ):
            return
        if self.ledger.mapping_overwritten(self.full):
            return
        if slot >= 0 and holders.wrong_slot(slot, requests):
            return
        raise Unconfirmed(f"SGLang's own mapping says the same of full page {self.page}", self.page)
