"""Reads from SGLang's own structures which pages are held, at the moment of asking.

The ledger is our record of the allocators' calls. It can be wrong, if SGLang has a way to hand
out or take back pages that no hook sees. So a finding that rests on the ledger is confirmed here
first. SGLang knows about its pages from these structures:

* the free lists of the allocators, and pages that are freed but not given back yet (the "free
  group");
* the rows of ``req_to_token`` that are in use: all rows that are not in
  ``ReqToTokenPool.free_slots``;
* the nodes of the prefix cache, and the rows that streaming sessions keep between their turns;
* ``full_to_swa_index_mapping``, which says which SWA page belongs to a full page.

The allocated length of a row is known only if we have seen its request, or if a streaming session
keeps the row. Any other row in use (disaggregated decode reserves such rows, for example) may hold
every page that its cells name.

Everything here waits for the device. It is called for a census, or when there is a suspicion.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from g4debug.hooking import prefix_tree, req_kv
from g4debug.hooking.free_group import in_free_group
from g4debug.ledger.books import Pages, on_host
from g4debug.ledger.free_lists import lists_of

NODES = 256  # nodes of the prefix cache that are read between two pauses of a look
_NONE: Pages = np.empty(0, dtype=np.int64)
_T = TypeVar("_T")


@dataclass(frozen=True)
class PoolView:
    """One pool. All arrays are int64 page indices in any order; page 0 may be among them.

    pages: the number of pages, including the reserved page 0.
    free: the free list. A page that is in it twice is here twice.
    owned: pages of the prefix cache, of rows with a known length, and of deferred frees.
    maybe: pages that are named in rows with an unknown length. They may be owned.
    """

    name: str
    pages: int
    free: Pages
    owned: Pages
    maybe: Pages


class Holders:
    """The structures of one server. Without a scheduler, only the allocator can be asked."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.scheduler: Any = None
        # While pages are handed out: the requests that get them, and how much each had before.
        # SGLang may have set their lengths already, and writes their rows later.
        self.growing: tuple[Sequence[Any], Sequence[int]] = ((), ())

    @property
    def page_size(self) -> int:
        return int(self.allocator.page_size)

    def pool(self, name: str) -> Any:
        """The allocator of one pool: "full" or "swa"."""
        return getattr(self.allocator, f"{name}_attn_allocator", self.allocator)

    def signature(self) -> tuple[int, ...]:
        """Numbers that differ after anything was handed out or taken back. Does not wait."""
        found = [len(self.scheduler.req_to_token_pool.free_slots)]
        for allocator in (self.pool("full"), self.pool("swa")):
            for pages in lists_of(allocator):
                found += (id(pages), len(pages))  # SGLang makes a new tensor each time
        return tuple(found)

    def free(self, name: str) -> Pages:
        """The pages in the free list of a pool."""
        return np.concatenate([on_host(pages) for pages in lists_of(self.pool(name))])

    def is_free(self, name: str, pages: Pages) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each of ``pages``, whether it is in the free list of its pool."""
        return np.isin(pages, self.free(name))

    def is_given_back(self, name: str, pages: Pages) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each of ``pages``, whether it is free, or waits in a free group to be."""
        return self.is_free(name, pages) | np.isin(pages, self.deferred(name))

    def deferred(self, name: str = "full") -> Pages:
        """Pages of a pool that were freed inside a free group and are not in the free list yet."""
        outer, inner = self.allocator, self.pool(name)
        # Outside of a free group, the lists still have what the last group gave back.
        inside = [a for a in {id(a): a for a in (outer, inner)}.values() if in_free_group(a)]
        tokens: list[torch.Tensor] = []
        pages: list[torch.Tensor] = []
        for allocator in inside:
            if name == "full":
                tokens += allocator.free_group or []
                tokens += getattr(allocator, "free_page_reps_group", [])  # first tokens, 0.5.18
                pages += getattr(allocator, "free_page_ids_group", [])
            elif hasattr(allocator, "swa_page_ids_group"):  # from 0.5.21 on, see free_hooks.py
                tokens += allocator.swa_free_group
                pages += allocator.swa_page_ids_group
        found = [self._pages_of([on_host(t) for t in tokens]), *map(on_host, pages)]
        return np.unique(np.concatenate(found))

    def mapped(self, full: Pages) -> Pages:
        """The SWA page of each full page by SGLang's mapping, 0 for none. -1: no such page.

        The page's first slot decides. For the other slots, see :meth:`slots`.
        """
        mapping = self.allocator.full_to_swa_index_mapping
        inside = (full > 0) & (full * self.page_size < len(mapping) - 1)
        tokens = torch.from_numpy(np.where(inside, full, 0) * self.page_size).to(mapping.device)
        return np.where(inside, on_host(mapping[tokens]) // self.page_size, -1)

    def slots(self, full: Pages) -> Pages:
        """The SWA slot of each slot of these full pages, by SGLang's mapping: [pages, page size].

        full: pages of the pool. A slot that no token has had yet may have any value.
        """
        mapping, size = self.allocator.full_to_swa_index_mapping, self.page_size
        at = torch.from_numpy(full[:, None] * size + np.arange(size)).to(mapping.device)
        found: Pages = on_host(mapping[at.clamp(0, len(mapping) - 1)])
        return found

    def wrong_slot(self, token: int, requests: Iterable[Any]) -> str:
        """Why the mapping of one slot of the full pool that is in use is wrong, '' if it is not.

        token: its index. All slots of a page that are in use lie in one SWA page, each in the place
        that it has in its own page, and no two slots have the same one. Nothing of this needs the
        ledger.
        """
        mapping, size = self.allocator.full_to_swa_index_mapping, self.page_size
        slots = int(self.pool("swa").size) + size
        if not 0 < token < len(mapping) - 1:
            return ""
        slot, requests = int(mapping[token]), list(requests)
        if not 0 <= slot < slots:
            return f"it says {slot}, and the SWA pool has {slots} slots"
        place = token % size
        if slot and slot % size != place:
            return f"it says slot {slot}, place {slot % size} of a page, and it is in place {place}"
        full = np.array([token // size])
        mates = self.slots(full)[0][: int(self.used(full, requests)[0])]
        apart, counts = np.unique((mates - np.arange(len(mates)))[mates > 0], return_counts=True)
        if len(apart) and counts.max() > 1:
            right = int(apart[counts.argmax()]) + token % size
            if slot != right:
                return f"it says slot {slot}, and by the page's other slots it is slot {right}"
        same = (mapping[:-1] == slot).nonzero().flatten().tolist() if slot >= size else []
        others = np.array([t // size for t in same if t != token], dtype=np.int64)
        if len(others):
            owned, _ = self.owned(requests)
            for other in others[np.isin(others, owned)].tolist():
                return f"it says slot {slot}, and so it does for full page {other}"
        return ""

    def path(self, request: Any) -> Pages | None:
        """The full pages that the prefix cache has for a request's first tokens, column by column.

        They are on the path of the tree that the request has locked. None if it is not known.
        """
        tree = self.scheduler.tree_cache
        tree = getattr(tree, "inner", tree)
        found = prefix_tree.slots(tree, request)
        if found is None:
            return None
        tokens = on_host(found)
        return tokens[:: self.page_size] // self.page_size

    def rows(self, requests: Iterable[Any]) -> dict[int, int]:
        """Tokens that are allocated in each row in use, -1 if that is not known.

        requests: the requests that we have seen. SGLang's running batch is added to them.
        """
        pool = self.scheduler.req_to_token_pool
        free = set(pool.free_slots)
        found = dict.fromkeys((r for r in range(len(pool.req_to_token)) if r not in free), -1)
        claims: dict[int, Any] = {}
        had = {id(r): n for r, n in zip(*self.growing, strict=True)}
        for request in (*requests, *self._running()):
            row = req_kv.row(request)
            if row not in found:
                continue
            other = claims.setdefault(row, request)
            length = req_kv.allocated(request)
            # If two requests say that a row is theirs, it is not known which length counts.
            found[row] = min(length, had.get(id(request), length)) if other is request else -1
        for slot in prefix_tree.session_slots(self.scheduler.tree_cache):
            row = req_kv.row(slot)
            if found.get(row, 0) < 0:
                found[row] = req_kv.allocated(slot)
        return found

    def in_rows(self, rows: dict[int, int]) -> tuple[Pages, Pages]:
        """The full pages of rows with a known length, and all pages that the other rows name."""
        sure = {row: length for row, length in rows.items() if length > 0}
        unsure = [row for row, length in rows.items() if length < 0]
        return self._cells(list(sure), list(sure.values())), self._cells(unsure)

    def row(self, index: int, length: int) -> Pages:
        """The full pages of the first ``length`` tokens of one row, column by column."""
        return self._cells([index], [length])

    def _cells(self, rows: list[int], lengths: list[int] | None = None) -> Pages:
        if not rows:
            return _NONE
        size, tokens = self.page_size, self.scheduler.req_to_token_pool.req_to_token
        pages = np.array(lengths or [tokens.shape[1]] * len(rows), dtype=np.int64)
        pages = -(-pages // size)
        begins = tokens[:, : int(pages.max()) * size : size]
        cells = on_host(begins[torch.tensor(rows, device=tokens.device)]) // size
        return cells[np.arange(cells.shape[1])[None, :] < pages[:, None]]

    def cached(self) -> Pages:
        """The full pages that the prefix cache holds."""
        return finish(self._cached())

    def _cached(self) -> Generator[None, None, Pages]:
        """The same, with a pause after every ``NODES`` nodes. A chunk cache holds none."""
        tree = self.scheduler.tree_cache
        tree = getattr(tree, "inner", tree)  # a StreamingSession is wrapped around the cache
        if hasattr(tree, "tree_components"):
            # The unified cache. Its tree may be in Rust. It lists the values of its full pages;
            # of a tombstone, too. That is one call without a pause.
            flat = on_host(tree.all_values_flatten())
            yield
            return self._pages_of([flat])
        root = getattr(tree, "root_node", None)
        found, values = [], []
        stack = list(root.children.values()) if root is not None else []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.value is not None and len(node.value):
                values.append(node.value)
            if len(values) == NODES or (values and not stack):
                found.append(on_host(torch.cat(values)))
                values.clear()
                yield
        return self._pages_of(found)

    def owned(self, requests: Iterable[Any]) -> tuple[Pages, Pages]:
        """The full pages that somebody owns, and those that somebody may own."""
        return finish(self._owned(requests))

    def _owned(self, requests: Iterable[Any]) -> Generator[None, None, tuple[Pages, Pages]]:
        cached = yield from self._cached()
        sure, unsure = self.in_rows(self.rows(requests))
        yield
        return np.unique(np.concatenate([cached, sure, self.deferred()])), np.unique(unsure)

    def mapping_contradicts(self, full: Pages, given: Pages, requests: Iterable[Any]) -> bool:
        """True if the mapping is wrong by SGLang's own structures, whatever the ledger says.

        The mapping is wrong if one of the pages ``full`` has a SWA page that is free, that does not
        exist, or that another full page has, too; or if the slots of one of them do not follow the
        slots of its SWA page. It is also wrong if a SWA page of ``given``, which these full pages
        should have, is lost: it is not free, no free group has it, and no full page has it.
        """
        theirs = self.mapped(full)
        requests = list(requests)
        if self._differs_within_a_page(full, requests):
            return True
        owned, maybe = self.owned(requests)
        mapped = self.mapped(np.unique(np.concatenate([owned, full])))
        last = int(self.pool("swa").size) // self.page_size
        for page in theirs[theirs != 0].tolist():
            if not 0 < page <= last or int((mapped == page).sum()) > 1:
                return True
        if self.is_free("swa", theirs[theirs > 0]).any():
            return True
        lost = given[given > 0]
        lost = lost[~np.isin(lost, mapped) & ~np.isin(lost, self.mapped(maybe))]
        lost = lost[~np.isin(lost, self.deferred("swa"))]
        return bool((~self.is_free("swa", lost)).any())

    def _differs_within_a_page(self, full: Pages, requests: list[Any]) -> bool:
        """True if the slots of one of these pages do not map to one SWA page, each to its place.

        Only slots that are in use count: SGLang's mapping of the others may be old.
        """
        size, tokens = self.page_size, len(self.allocator.full_to_swa_index_mapping) - 1
        inside = full[(full > 0) & (full * size < tokens)]
        if size == 1 or not len(inside):
            return False
        slots, used = self.slots(inside), self.used(inside, requests)
        live = np.arange(size) < used[:, None]
        if not live.any():
            return False
        gone = slots[:, :1] == 0  # evicted as a whole, or only its first slot was overwritten
        right = np.where(gone, 0, slots[:, :1] // size * size + np.arange(size))
        return bool(((slots != right) & live).any())

    def used(self, full: Pages, requests: Iterable[Any]) -> Pages:
        """How many slots of each of these full pages hold a token of somebody; 0 if not known."""
        size, tokens = self.page_size, self.scheduler.req_to_token_pool.req_to_token
        found = np.where(np.isin(full, self.cached()), size, 0)
        for row, length in self.rows(requests).items():
            if length <= 0:
                continue
            cells = on_host(tokens[row, :length:size]) // size
            for i, page in enumerate(full.tolist()):
                at = (cells == page).nonzero()[0]
                if len(at):
                    found[i] = max(found[i], min(size, length - int(at[-1]) * size))
        return found

    def is_served(self, row: int, requests: Iterable[Any]) -> bool:
        """True if a request that is not finished holds this row of ``req_to_token``."""
        known = (*requests, *self._running())
        return any(req_kv.row(r) == row and not r.finished() for r in known)

    def look(self, requests: Iterable[Any]) -> Generator[None, None, list[PoolView]]:
        """Look at all pools. It pauses often, so that a server need not wait for its end.

        Nothing may change between the first step and the last one.
        """
        owned, maybe = yield from self._owned(requests)
        views = [self._view("full", owned, maybe)]
        yield
        if self.pool("swa") is not self.allocator:
            mapped = np.concatenate([self.mapped(owned), self.deferred("swa")])
            views.append(self._view("swa", mapped, self.mapped(maybe)))
        return views

    def _view(self, name: str, owned: Pages, maybe: Pages) -> PoolView:
        pages = int(self.pool(name).size) // self.page_size + 1
        return PoolView(name, pages, self.free(name), owned, maybe)

    def _running(self) -> list[Any]:
        batches = (getattr(self.scheduler, name, None) for name in ("running_batch", "last_batch"))
        return [r for batch in batches if batch is not None for r in batch.reqs or ()]

    def _pages_of(self, tokens: list[Pages]) -> Pages:
        return np.unique(np.concatenate([_NONE, *tokens]) // self.page_size)


def finish(steps: Generator[None, None, _T]) -> _T:
    """Go through all steps at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: _T = end.value
            return value
