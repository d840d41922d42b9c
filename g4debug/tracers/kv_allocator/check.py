"""The rules for an allocator: a page has one holder, and a full page has one SWA page.

These are pure functions on arrays of page indices. They cost O(pages given). The pages of a pool
are 1..held.size-1. Page 0 is reserved and never handed out (sglang mem_cache/allocator.py,
``clear``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from g4debug.ledger.books import FEW, distinct

Pages = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Violation:
    """kind: the kind of finding. pages: int64 [n], the bad pages, in the order given."""

    kind: str
    pages: Pages


def check_handed_out(pages: Pages, held: Flags) -> Violation | None:
    """Pages that an allocator hands out must be free pages of its pool, and each only once.

    pages: int64 [n]. held: bool [pages of the pool], the state before.
    """
    if len(pages) <= FEW:
        if _are_free_and_distinct(pages.tolist(), held):
            return None
    elif _are_pages(pages, held) and not held[pages].any() and _different(pages) == len(pages):
        return None
    zero = pages == 0
    outside = (pages < 0) | (pages >= len(held))
    if outside.any():
        return Violation("out-of-range", pages[outside])
    if zero.any():
        return Violation("page-zero", pages[zero])
    double = held[pages] | _again(pages)
    return Violation("double-alloc", pages[double]) if double.any() else None


def check_freed(pages: Pages, held: Flags, ever: Flags) -> tuple[Violation, ...]:
    """Pages that are given back must be held, and each is given back only once.

    held: bool [pages of the pool], the state before. ever: bool [pages of the pool], True for a
    page that was handed out at least once since the process started.
    """
    if len(pages) <= FEW:
        if len(pages) > 0 and _are_held_in_order(pages.tolist(), held):
            return ()
    elif _are_pages(pages, held) and held[pages].all() and (pages[1:] > pages[:-1]).all():
        return ()  # sound, and sorted, as almost always; what follows costs five times as much
    outside = (pages < 0) | (pages >= len(held))
    found = []
    if outside.any():
        found.append(Violation("out-of-range", pages[outside]))
    if (pages == 0).any():
        found.append(Violation("page-zero", pages[pages == 0]))
    inside = pages[~outside & (pages != 0)]
    loose = ~held[inside]
    never = loose & ~ever[inside]
    if never.any():
        found.append(Violation("free-unallocated", inside[never]))
    double = (loose & ever[inside]) | _again(inside)
    if double.any():
        found.append(Violation("double-free", inside[double]))
    return tuple(found)


def check_partners(freed: Pages, expected: Pages) -> tuple[Pages, Pages]:
    """Compare the SWA pages that are freed with the partners of the full pages that are freed.

    expected: int64, sorted, the SWA pages of the full pages. If it has a -1, one of them is not
    known, and nothing is concluded. Returns (freed but not expected, expected but not freed).
    """
    none = np.empty(0, dtype=np.int64)
    if len(expected) and expected[0] < 0:
        return none, none
    # As lists, a few pages are compared in a fraction of the time, and thousands in a hundredfold.
    few = len(freed) <= FEW
    if freed.tolist() == expected.tolist() if few else np.array_equal(freed, expected):
        return none, none
    return np.setdiff1d(freed, expected), np.setdiff1d(expected, freed)


def in_window(positions: Pages, page_size: int, query: int, window: int) -> Flags:
    """True for the pages that the next query token still attends to.

    positions: int64 [n], the position of each page's first token. query: the position of the next
    query token, which is also how many tokens have KV. window: how many tokens before itself a
    query token sees, so a query at q sees q-window..q.
    """
    return (positions >= 0) & (positions + page_size > query - window) & (positions < query)


def _are_pages(pages: Pages, held: Flags) -> bool:
    """True if all are pages of the pool, and there is at least one."""
    return len(pages) > 0 and bool(pages.min() > 0 and pages.max() < len(held))


def _different(pages: Pages) -> int:
    """How many different pages these are. Up to some hundreds, a set is faster than sorting."""
    return len(set(pages.tolist())) if len(pages) <= 256 else len(distinct(pages))


def _are_free_and_distinct(pages: list[int], held: Flags) -> bool:
    """True if all are free pages of the pool, and none is there twice."""
    end = len(held)
    for page in pages:
        if not 0 < page < end or held[page]:
            return False
    return len(set(pages)) == len(pages)


def _are_held_in_order(pages: list[int], held: Flags) -> bool:
    """True if all are held pages of the pool, each greater than the one before it."""
    last, end = 0, len(held)
    for page in pages:
        if not last < page < end or not held[page]:
            return False
        last = page
    return True


def _again(pages: Pages) -> Flags:
    """True where a page occurs for the second time or later."""
    again = np.ones(len(pages), dtype=np.bool_)
    again[np.unique(pages, return_index=True)[1]] = False
    return again
