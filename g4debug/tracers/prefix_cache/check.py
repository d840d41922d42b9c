"""Checks the pages that a request hands to the prefix cache, and those that the cache hands out.

These are pure functions on arrays. Slots come in whole pages: the i-th ``size`` of them belong to
the i-th page of a prompt. Each function returns the first violation. If a violation rests on our
own record of the allocators, :mod:`.confirm` asks SGLang's structures before it is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from g4debug.ledger.books import Flags, Pages, distinct
from g4debug.tracers.prefix_cache.contents import Contents
from g4debug.tracers.prefix_cache.digests import Digests


@dataclass(frozen=True)
class Violation:
    """kind: the violation's name. column: the first bad page's place in the prompt. page: its index
    in the full pool. got: a description of the bad page, if the kind alone does not say it. right:
    the page that the prefix cache has there, -1 if that is not the question."""

    kind: str
    column: int
    page: int
    got: str = ""
    right: int = -1


@dataclass(frozen=True)
class Known:
    """Our record of each page of the full pool: arrays as in ``PoolLedger``."""

    held: Flags
    owner: np.ndarray[Any, np.dtype[np.object_]]
    position: Pages


def whole_pages(slots: Pages, size: int, pages: int) -> Violation | None:
    """Each page's slots are all of one page, in its order, and the pool has that page.

    pages: of the pool, including the reserved page 0.
    """
    rows = slots.reshape(-1, size)
    first = rows[:, 0]
    outside = (first < size) | (first >= pages * size)
    if outside.any():
        at = int(outside.argmax())
        return Violation("no-page", at, int(first[at]) // size)
    broken = (rows != first[:, None] + np.arange(size)).any(axis=1) | (first % size != 0)
    if broken.any():
        at = int(broken.argmax())
        got = ", ".join(map(str, rows[at][:8].tolist())) + (", …" if size > 8 else "")
        return Violation("not-in-order", at, int(first[at]) // size, f"slots {got}")
    return None


def handed_over(
    pages: Pages, digests: Digests, contents: Contents, known: Known | None, request: str,
    lent: int, size: int, placed: bool,
) -> Violation | None:  # fmt: skip
    """The pages of a request's first tokens are its own, or the prefix cache lent them to it.

    lent: how many of the first ones the prefix cache lent. placed: our record of a page's position
    is from the request's present life, not from before a retraction.
    """
    if len(distinct(pages)) < len(pages):
        unique, counts = np.unique(pages, return_counts=True)
        page = int(unique[counts > 1][0])
        at = int((pages == page).nonzero()[0][1])
        return Violation("twice", at, page)
    before = contents.digest[pages]
    other = (before != 0) & (before != digests)
    if other.any():
        at = int(other.argmax())
        return Violation("holds-other", at, int(pages[at]))
    if known is None:
        return None
    free = ~known.held[pages]
    if free.any():
        at = int(free.argmax())
        return Violation("freed", at, int(pages[at]))
    if not request:
        return None
    columns = np.arange(len(pages))
    fresh = (before == 0) & (columns >= lent)
    owners = known.owner[pages]
    foreign = fresh & (owners != request) & (owners != "")
    if foreign.any():
        at = int(foreign.argmax())
        return Violation("foreign", at, int(pages[at]))
    where = known.position[pages]
    moved = fresh & (owners == request) & (where >= 0) & (where != columns * size)
    if placed and moved.any():
        at = int(moved.argmax())
        token = int(where[at])
        got = f"it was given for the tokens {token}..{token + size - 1}"
        return Violation("misplaced", at, int(pages[at]), got)
    return None


def other_than(row: Pages, nodes: Pages, size: int) -> Violation | None:
    """A request's row has the slots that the prefix cache has for its first tokens.

    row, nodes: slots of these tokens, of the row and of the nodes; the longer one's rest is not
    looked at.
    """
    count = min(len(row), len(nodes))
    differs = row[:count] != nodes[:count]
    if not differs.any():
        return None
    token = int(differs.argmax())
    by_row, by_node = int(row[token]), int(nodes[token])
    got = f"token {token} is in slot {by_row} by the row, and in slot {by_node} by the node"
    return Violation("lent-row", token // size, by_row // size, got, by_node // size)


def handed_out(pages: Pages, digests: Digests, contents: Contents) -> Violation | None:
    """The pages hold the KV of the tokens for which they are handed out."""
    holds = contents.digest[pages]
    wrong = (holds != 0) & (holds != digests)
    if wrong.any():
        at = int(wrong.argmax())
        return Violation("wrong-page", at, int(pages[at]))
    lost = holds == 0
    if lost.any():
        at = int(lost.argmax())
        return Violation("freed-page", at, int(pages[at]))
    return None
