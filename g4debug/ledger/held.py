"""Which pages the ledger has as handed out for some requests: a note for the dump of a crash.

One pass over the pages of all pools, so it is made only when the server is dead anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from g4debug.findings.record import Held

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger

MOST_RUNS = 8192  # of page numbers that a dump keeps, of all requests together


def of_requests(ledger: Ledger | None, requests: Collection[str]) -> tuple[Held, ...]:
    """For each pool and request, the pages that were handed out for it and not freed since.

    Pages that the prefix cache lends belong to the request that they were handed out for. () if
    there is no ledger, or if it was given up. Nothing is asked of the device: the events that have
    not reached the host are lost.
    """
    if ledger is None or ledger.broken:
        return ()
    wanted, found, room = set(requests) - {""}, list[Held](), MOST_RUNS
    for pool in ledger.pools.values():
        held = np.flatnonzero(pool.held)
        pages: dict[str, list[int]] = {request: [] for request in requests if request in wanted}
        for page, owner in zip(held.tolist(), pool.owner[held].tolist(), strict=True):
            if owner in wanted:
                pages[owner].append(page)
        for request, own in pages.items():
            runs = _runs(own)[: 2 * room]
            room -= len(runs) // 2
            found.append(Held(pool.name, request, tuple(runs), len(own)))
    return tuple(found)


def _runs(pages: Iterable[int]) -> list[int]:
    """The first and the last of each run of numbers that follow each other. pages: ascending."""
    runs: list[int] = []
    for page in pages:
        if runs and page == runs[-1] + 1:
            runs[-1] = page
        else:
            runs += page, page
    return runs
