"""Which pages the ledger has as handed out for some requests: a note for the dump of a crash.

One pass over the pages of all pools, so it is made only when the server is dead anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from g4debug.findings.record import Held
from g4debug.findings.runs import runs

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
    found, room = list[Held](), MOST_RUNS
    for pool in ledger.pools.values():
        held = np.flatnonzero(pool.held)
        pages: dict[str, list[int]] = {request: [] for request in requests if request}
        for page, owner in zip(held.tolist(), pool.owner[held].tolist(), strict=True):
            if owner in pages:
                pages[owner].append(page)
        for request, own in pages.items():
            kept = runs(own)[:room]
            room -= len(kept)
            found.append(Held(pool.name, request, tuple(chain.from_iterable(kept)), len(own)))
    return tuple(found)
