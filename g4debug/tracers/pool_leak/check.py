"""Conservation of pages: each is free, or held by the prefix cache or a live request.

A pure function on numpy arrays. SGLang's own check compares *counts* at idle
(``_check_pool_invariant``); this one says which pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Pages = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Census:
    """Page indices, sorted. leaked: neither free nor owned. double: free and owned.
    repeated: more than once in the free list. outside: in the free list, not in the pool."""

    leaked: Pages
    double: Pages
    repeated: Pages
    outside: Pages

    @property
    def sound(self) -> bool:
        return not (len(self.leaked) + len(self.double) + len(self.repeated) + len(self.outside))


def take_census(pages: int, free: Pages, owned: Pages) -> Census:
    """Check one pool.

    pages: number of pages, the reserved page 0 included. free: the allocator's free list, in
    any order. owned: pages of the prefix cache and of live requests, in any order, shared ones
    as often as they are shared; indices outside the pool and page 0 are not counted.
    """
    inside = free[(free > 0) & (free < pages)]
    times_free = np.bincount(inside, minlength=pages)
    is_owned = np.zeros(pages, dtype=np.bool_)
    is_owned[owned[(owned > 0) & (owned < pages)]] = True
    lost = (times_free == 0) & ~is_owned
    lost[0] = False
    return Census(
        leaked=lost.nonzero()[0],
        double=((times_free > 0) & is_owned).nonzero()[0],
        repeated=(times_free > 1).nonzero()[0],
        outside=np.unique(free[(free <= 0) | (free >= pages)]),
    )
