"""The rules for the pages of a pool: none is lost, and none is free and in use at once.

This is a pure function on numpy arrays. SGLang's own check (``_check_pool_invariant``) compares
*counts* when the server is idle. This one tells which pages are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Pages = np.ndarray[Any, np.dtype[np.int64]]
_NONE: Pages = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Census:
    """The pages of one pool that are wrong: page indices, sorted.

    leaked: neither free nor owned. double: free and used at once. repeated: in the free list more
    than once. outside: in the free list, but the pool has no such page. shared: two nodes of the
    prefix cache have it.
    """

    leaked: Pages
    double: Pages
    repeated: Pages
    outside: Pages
    shared: Pages = field(default_factory=_NONE.copy)

    def wrong(self) -> dict[str, Pages]:
        """Kind of finding -> its pages, which may be none."""
        return vars(self)

    @property
    def sound(self) -> bool:
        return not any(map(len, self.wrong().values()))


def take_census(
    pages: int,
    free: Pages,
    owned: Pages,
    maybe: Pages = _NONE,
    used: Pages | None = None,
    shared: Pages = _NONE,
) -> Census:
    """Check one pool.

    pages: the number of pages, including the reserved page 0. free: the allocator's free list, in
    any order. owned: the pages that the prefix cache or a live request has to give back, in any
    order. A page that is shared may be in it several times; page 0 and indices outside the pool are
    ignored. maybe: pages that may be owned: they are neither lost nor, if they are free, in use for
    certain. used: the pages that somebody reads; None for those that are owned. shared: pages that
    two nodes of the prefix cache have.
    """
    inside = free[(free > 0) & (free < pages)]
    times_free = np.bincount(inside, minlength=pages)

    def among(some: Pages) -> np.ndarray[Any, np.dtype[np.bool_]]:
        found = np.zeros(pages, dtype=np.bool_)
        found[some[(some > 0) & (some < pages)]] = True
        return found

    is_owned = among(owned)
    is_used = is_owned if used is None else among(used)
    lost = (times_free == 0) & ~is_owned & ~among(maybe)
    lost[0] = False
    return Census(
        leaked=lost.nonzero()[0],
        double=((times_free > 0) & is_used).nonzero()[0],
        repeated=(times_free > 1).nonzero()[0],
        outside=np.unique(free[(free <= 0) | (free >= pages)]),
        shared=np.unique(shared),
    )
