"""Asks SGLang's own structures whether a violation that the page ledger sees is real.

The ledger can be wrong. So each violation that rests on it needs a second source: the free lists,
the rows of ``req_to_token`` that are in use, the prefix cache, and the full-to-SWA mapping. Where
these agree among themselves, and only the ledger differs, nothing is wrong with the server.

An allocator without a scheduler around it (in a canary, or in a test) has no rows and no prefix
cache. There the free lists are asked, and what they cannot tell is believed.
"""

from __future__ import annotations

import numpy as np

from g4debug.findings.record import PageEvent
from g4debug.hooking import req_kv
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.holders import Holders
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.kv_allocator.check import Pages, Violation


def is_real(ledger: Ledger, pool: PoolLedger, event: PageEvent, violation: Violation) -> bool:
    """True if SGLang's own structures confirm the violation of at least one page.

    It must be called at the moment of the event: before a free happens, or after a hand-out.
    Waits for the device.
    """
    holders, pages = ledger.holders, violation.pages
    if holders is None:
        return True
    match violation.kind:
        case "use-after-free" if len(pool.inside(pages)) < len(pages):
            return True  # a sequence goes on in page 0: the mapping has no SWA page for it
        case "double-free" | "free-unallocated" | "use-after-free":
            twice_at_once = violation.kind == "double-free" and bool(pool.held[pages].any())
            if violation.kind != "use-after-free" and _is_certain(ledger, pool):
                return True
            if ledger.late and event.kind in ("free", "evict"):
                return _is_given_back_twice(ledger, holders, pool, pages)
            return twice_at_once or _is_given_back(holders, pool, pages)
        case "double-alloc":
            if _is_certain(ledger, pool):
                return True
            return _is_held_by_another(ledger, holders, pool, event, pages)
        case "mapping-mismatch":
            return _is_mapping_wrong(ledger, holders, pool, pages)
        case "maps-freed" if event.kind == "map":
            return _is_given_back(holders, pool, pages)
        case "maps-freed":
            return _is_mapped(ledger, holders, pages)
    return True  # needs no ledger, or was confirmed where it was found


def in_question(ledger: Ledger, pool: PoolLedger, violation: Violation) -> tuple[str, Pages]:
    """The pool and its pages that a violation is about, if it is not real."""
    if violation.kind == "mapping-mismatch" and pool.name == "swa" and ledger.pairs is not None:
        return "full", ledger.pairs.full
    return pool.name, violation.pages


def _is_certain(ledger: Ledger, pool: PoolLedger) -> bool:
    """True if no event of the allocator was missed, so the ledger knows which pages are held.

    Then a page that SGLang's structures do not have where it must be was taken out of them, or put
    there, without an event.
    """
    return not ledger.missed(pool.name)


def _is_given_back(holders: Holders, pool: PoolLedger, pages: Pages) -> bool:
    """One of the pages is in the free list, or waits to be put there."""
    return bool(holders.is_given_back(pool.name, pages).any())


def _is_given_back_twice(ledger: Ledger, holders: Holders, pool: PoolLedger, pages: Pages) -> bool:
    """One of the pages, which were just freed, is twice free, or is free and still used."""
    free = holders.free(pool.name)
    listed = free[np.isin(free, pages)]
    if len(np.unique(listed)) < len(listed):
        return True
    if holders.scheduler is None:
        return True
    owned, _ = holders.owned(ledger.requests.values())
    owned = owned if pool.name == "full" else holders.mapped(owned)
    return bool(np.isin(listed, owned).any())


def _is_held_by_another(
    ledger: Ledger, holders: Holders, pool: PoolLedger, event: PageEvent, pages: Pages
) -> bool:
    """One of the pages, which were just handed out, is still free, or was held before."""
    if len(np.unique(pages)) < len(pages) or holders.is_free(pool.name, pages).any():
        return True
    if holders.scheduler is None:
        return True
    requests = list(ledger.requests.values())
    if pool.name == "full" and np.isin(pages, holders.cached()).any():
        return True
    cells, _ = holders.in_rows(holders.rows(requests))
    request = ledger.requests.get(event.request)
    row = -1 if request is None else req_kv.row(request)
    own = holders.row(row, req_kv.allocated(request)) if row >= 0 else None
    if pool.name == "swa":
        # Several rows may share a full page. Its SWA page has one holder all the same.
        cells = holders.mapped(np.unique(np.concatenate([cells, holders.cached()])))
        own = None if own is None else holders.mapped(own)
    # A page of an event that is entered late may be in the new holder's row already.
    late = ledger.late
    for page in np.unique(pages):
        named = int((cells == page).sum())
        by_new_holder = late and (own is None or bool((own == page).any()))
        if named > by_new_holder:
            return True
    return False


def _is_mapping_wrong(ledger: Ledger, holders: Holders, pool: PoolLedger, pages: Pages) -> bool:
    """SGLang's mapping contradicts itself about the SWA pages that are in question."""
    if holders.scheduler is None:
        return True
    if pool.name == "swa" and ledger.pairs is not None:
        # SWA pages are freed: the question is about the full pages that they belong to.
        full, given = ledger.pairs.full, ledger.pairs.given
    else:
        full = pool.inside(pages)
        given = pool.partner[full]
        if np.array_equal(holders.mapped(full), given):
            return True  # the mapping and the ledger agree: it was the allocator that erred
    if ledger.mapping_overwritten(full):
        return True
    return holders.mapping_contradicts(full, given, ledger.requests.values())


def _is_mapped(ledger: Ledger, holders: Holders, pages: Pages) -> bool:
    """The SWA page of a full page that somebody owns is among ``pages``."""
    if holders.scheduler is None:
        return True
    owned, _ = holders.owned(ledger.requests.values())
    return bool(np.isin(pages, holders.mapped(owned)).any())
