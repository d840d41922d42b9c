"""Digests of a prompt's tokens up to the end of each page: a page's KV is computed from these.

KV of a token depends on all tokens before it. So two pages hold the same KV if all tokens up to
their ends are the same, and they are of the same namespace (LoRA, cache salt). With EAGLE's keys of
pairs a page depends on the first token behind it, too.

The digest of n tokens is the sum of one 64-bit number for each token and its position. Two
different beginnings have the same digest with a probability of about 2**-64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Digests = np.ndarray[Any, np.dtype[np.uint64]]
_TOKEN, _PLACE = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST = np.uint64(31)


def of_pages(tokens: Sequence[int], pages: int, size: int, pairs: int, space: object) -> Digests:
    """uint64 [pages]: the digest of each page. 0 does not occur.

    tokens: at least ``pages * size`` of them, and one more with pairs. size: tokens of a page.
    pairs: 0 or 1. space: what else must be the same.
    """
    ends = np.arange(1, pages + 1, dtype=np.int64) * size + pairs
    count = int(ends[-1]) if pages else 0
    given = np.asarray(tokens[:count])
    if given.dtype.kind != "i":  # beyond int64
        given = np.array([hash(t) for t in tokens[:count]], dtype=np.int64)
    with np.errstate(over="ignore"):
        mixed = given.astype(np.int64).view(np.uint64) * _TOKEN
        mixed ^= np.arange(1, count + 1, dtype=np.uint64) * _PLACE
        for shift, factor in _MIX:
            mixed ^= mixed >> shift
            mixed *= factor
        mixed ^= mixed >> _LAST
        sums = np.cumsum(mixed, dtype=np.uint64)[ends - 1] if pages else mixed
        sums = sums + np.uint64(hash(space) & 0xFFFFFFFFFFFFFFFF)
    sums[sums == 0] = 1
    return sums
