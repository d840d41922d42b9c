"""Looks at who has which page, in SGLang's own structures.

A page is *owned* by whoever has to give it back: by a node of the prefix cache, by a request for
the part of its row that the prefix cache does not have, or by a free that SGLang has deferred. A
page is *used* where somebody only reads it: the part of a request's row that belongs to the prefix
cache, and the SWA page that a tombstone still leads to. A page that is used and not owned is lost:
nobody will ever give it back. SGLang's own check counts the same, in tokens.

* In the SWA pool a node owns a page only if it is no tombstone, and a request only where it has not
  given the page back before (``swa_evicted_seqlen``).
* A request that belongs to a session, and one that does not say how much of it is the prefix
  cache's, may own all of its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4debug.hooking import prefix_tree, req_kv
from g4debug.hooking.prefix_tree import Sizes
from g4debug.ledger import cache_tree
from g4debug.ledger.books import Pages, on_host
from g4debug.ledger.holders import Holders

_NONE: Pages = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class View:
    """One pool. All arrays are int64 page indices in any order; page 0 may be among them.

    pages: the number of pages, including the reserved page 0.
    free: the free list. A page that is in it twice is here twice.
    owned: pages that somebody has to give back.
    used: pages that somebody reads; owned pages need not be among them.
    maybe: pages that are named in rows of unknown length. They may be owned.
    shared: pages that two nodes of the prefix cache hold.
    cached: how many tokens the nodes of the prefix cache hold. sizes: the prefix cache's own
        figures; None if there is no tree.
    """

    name: str
    pages: int
    free: Pages
    owned: Pages
    used: Pages
    maybe: Pages
    shared: Pages
    cached: int
    sizes: Sizes | None


@dataclass(frozen=True)
class Rows:
    """The rows of ``req_to_token``.

    unknown: rows in use by a request that nobody has seen. again: rows that are in the free list
    more than once. outside: what is in that list, and is no row that may be given to a request.
    """

    unknown: tuple[int, ...]
    again: tuple[int, ...]
    outside: tuple[int, ...] = ()


def look(
    holders: Holders, requests: Iterable[Any]
) -> Generator[None, None, tuple[list[View], Rows]]:
    """Look at all pools and rows. It pauses often, so that a server need not wait for its end.

    Nothing may change between the first step and the last one.
    """
    requests, size = list(requests), holders.page_size
    tree = prefix_tree.innermost(holders.scheduler.tree_cache)
    hybrid = holders.pool("swa") is not holders.allocator
    cached = yield from cache_tree.read(tree)
    rows = holders.rows(requests)
    own, own_swa, read = _of_rows(holders, rows, requests)
    _, maybe = holders.in_rows({row: length for row, length in rows.items() if length < 0})
    yield
    late = holders.deferred()
    nodes = np.unique(cached.full // size)
    views = [
        _view(
            holders, tree, "full", hybrid,
            owned=np.concatenate([nodes, own, late]), used=read, maybe=maybe,
            shared=_twice(cached.full) // size, cached=len(cached.full),
        )
    ]  # fmt: skip
    yield
    if hybrid:
        owners = np.unique(np.concatenate([cached.alive // size, own_swa, late]))
        users = np.unique(np.concatenate([nodes, own, read]))
        views.append(
            _view(
                holders, tree, "swa", hybrid,
                owned=np.concatenate([holders.mapped(owners), holders.deferred("swa")]),
                used=holders.mapped(users), maybe=holders.mapped(maybe),
                shared=_NONE, cached=cached.swa_tokens,
            )
        )  # fmt: skip
    table = holders.scheduler.req_to_token_pool
    free, last = list(table.free_slots), len(table.req_to_token)
    # Where SGLang has a row more than it gives out, that is row 0, for padding.
    first = 1 if last > int(getattr(table, "size", last)) else 0
    again = sorted(row for row, times in Counter(free).items() if times > 1)
    unknown = sorted(row for row, length in rows.items() if length < 0 and row > 0)
    outside = sorted({row for row in free if not first <= row < last})
    return views, Rows(tuple(unknown), tuple(again), tuple(outside))


def _twice(slots: Pages) -> Pages:
    found, counts = np.unique(slots, return_counts=True)
    return found[counts > 1]


def _view(
    holders: Holders, tree: Any, name: str, hybrid: bool, *, used: Pages, owned: Pages, **more: Any
) -> View:
    pages = int(holders.pool(name).size) // holders.page_size + 1
    sizes = prefix_tree.sizes(tree, name, hybrid)
    return View(
        name, pages, holders.free(name), owned, np.concatenate([owned, used]), sizes=sizes, **more
    )


def _of_rows(
    holders: Holders, rows: dict[int, int], requests: Iterable[Any]
) -> tuple[Pages, Pages, Pages]:
    """The rows of known length: (full pages they own, those with an SWA page, full pages lent).

    An SWA page counts if the row owns it, too. The prefix cache lends pages.
    """
    size = holders.page_size
    by_row = {req_kv.row(request): request for request in requests}
    own, own_swa, read = [_NONE], [_NONE], [_NONE]
    sure = {row: -(-length // size) for row, length in rows.items() if length > 0}
    if not sure:
        return _NONE, _NONE, _NONE
    table = holders.scheduler.req_to_token_pool.req_to_token
    begins = table[:, : max(sure.values()) * size : size]
    named = on_host(begins[torch.tensor(list(sure), device=table.device)].flatten()) // size
    for (row, count), line in zip(sure.items(), named.reshape(len(sure), -1), strict=True):
        cells = line[:count]
        lent, dead_from, dead_to = _parts(by_row.get(row), size)
        at = np.arange(count)
        mine = at >= lent
        own.append(cells[mine])
        own_swa.append(cells[mine & ~((at >= dead_from) & (at < dead_to))])
        read.append(cells[~mine])
    return np.concatenate(own), np.concatenate(own_swa), np.concatenate(read)


def _parts(request: Any, size: int) -> tuple[int, int, int]:
    """In pages: how many of a row's first ones are the prefix cache's, and from where to where its
    own ones have lost their SWA pages."""
    if request is None or getattr(request, "session", None) is not None:
        return 0, 0, 0
    protected = req_kv.protected(request)
    if protected is None:
        return 0, 0, 0
    try:
        evicted = req_kv.evicted(request)
    except AttributeError:
        evicted = 0
    record = req_kv.holder(request, "swa_dead_lo")
    lowest = record.swa_dead_lo(size) if hasattr(record, "swa_dead_lo") else protected
    return protected // size, -(-int(lowest) // size), evicted // size
