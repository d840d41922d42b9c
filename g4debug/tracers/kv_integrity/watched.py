"""The knowledge about one KV pool: which pages are stamped, sealed, or being filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.hooking.kv_buffers import buffers_of
from g4debug.ledger.books import Pages, PoolLedger
from g4debug.tracers.kv_integrity.kv_pages import KvPages

CHUNK = 4096  # tokens read at a time; the device needs extra memory for so many of a buffer


@dataclass
class Look:
    """Complete pages, as they were when the device was told to look at them.

    What it sees arrives later. Then the pages may be somebody else's.

    pages, positions, sealed_at, since: int64 [n]: the pages, the position of the first token of
        each, and the steps in which each was sealed and was last seen unchanged.
    owners: rid [n].
    step: in which the device was told.
    behind: the number of the last hand-out before that.
    others: pages that had been handed out by then, as was learnt later: their KV is not the one
        that was sealed.
    """

    pages: Pages
    positions: Pages
    sealed_at: Pages
    since: Pages
    owners: Any
    step: int
    behind: int
    others: set[int] = field(default_factory=set)


@dataclass
class Watched:
    """One pool.

    pool: the ledger's record of this pool.
    layers: for each layer of this pool, the number that it has in the model.
    runner: "draft" if it is the pool of a draft, with the pages of the target's.
    filling: page -> rid, for pages that were handed out and are not complete yet.
    leaving: pages that are being freed.
    stamped, sealed: bool [pages], the state that the device will have when it has caught up.
    sealed_at, checked_at: int64 [pages], the steps in which a page was sealed and last compared.
    hand_outs: how many hand-outs this tracer itself has seen. They do not rest on the ledger: if
        that misses a free, a page may have a new owner unnoticed.
    looks: what the device was told to compare, while the result has not arrived.
    """

    pool: PoolLedger
    kv: KvPages
    layers: list[int]
    runner: str = ""
    filling: dict[int, str] = field(default_factory=dict)
    leaving: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    entered: set[int] = field(default_factory=set)  # the ledger told of their hand-out, not we yet
    fresh: list[Pages] = field(default_factory=list)  # stamped since the last launch
    hand_outs: int = 0
    looks: list[Look] = field(default_factory=list)
    _cursor: int = 0

    def __post_init__(self) -> None:
        self.stamped = np.zeros(self.pool.pages, dtype=np.bool_)
        self.sealed = np.zeros(self.pool.pages, dtype=np.bool_)
        self.sealed_at = np.zeros(self.pool.pages, dtype=np.int64)
        self.checked_at = np.zeros(self.pool.pages, dtype=np.int64)

    def enter(self, event: PageEvent, pages: Pages) -> None:
        """Take note of an event, before the ledger enters it."""
        inside = self.pool.inside(pages)
        if event.kind in ("extend", "decode", "alloc"):
            self.stamped[inside] = False
            self.entered.update(inside.tolist())
            if event.request:
                self.filling.update(dict.fromkeys(inside.tolist(), event.request))
        elif event.kind in ("free", "evict"):
            # Only pages that are held: a page that is freed twice may be somebody else's by now.
            self.leaving = np.unique(inside[self.pool.held[inside]])
        elif event.kind == "clear":
            self.forget()

    def handed_out(self, pages: Pages, number: int) -> None:
        """These pages were handed out, as the tracer's own hooks saw. What was known ends here.

        number: of this hand-out.
        """
        inside = self.pool.inside(pages).tolist()
        for look in self.looks:
            if number <= look.behind:
                look.others.update(inside)
        for page in inside:
            self.stamped[page] = self.sealed[page] = False
            if page in self.entered:
                self.entered.discard(page)
            else:  # the ledger has missed it, so the owner and the position are not this turn's
                self.filling.pop(page, None)

    def gone(self) -> tuple[Pages, Pages]:
        """(pages that the last free took, the sealed ones among them). Stamp them now."""
        leaving, self.leaving = self.leaving, np.empty(0, dtype=np.int64)
        gone = leaving[~self.pool.held[leaving]]  # a tracer may have kept some from being freed
        sealed = gone[self.sealed[gone]]
        self.sealed[gone] = False
        self.stamped[gone] = True
        self.fresh.append(gone)
        for page in gone.tolist():
            self.filling.pop(page, None)
        return gone, sealed

    def look(self, pages: Pages, step: int) -> Look:
        """The knowledge about these pages now, in this step."""
        pool = self.pool
        known = pool.position[pages], self.sealed_at[pages], self.checked_at[pages]
        return Look(pages, *known, pool.owner[pages], step, self.hand_outs)

    def forget(self) -> None:
        """The allocator was cleared. The memory may even have been given back."""
        self.stamped[:] = self.sealed[:] = False
        self.filling.clear()
        self.entered.clear()
        self.fresh.clear()

    def launched(self) -> Pages:
        """A forward was launched. Returns the pages that were stamped since the one before it."""
        fresh, self.fresh = self.fresh, []
        return np.concatenate(fresh) if fresh else np.empty(0, dtype=np.int64)

    def on_device(self, pages: Pages) -> torch.Tensor:
        """These page indices on the device of the pool."""
        return to_device(pages, self.kv.device)

    def completed(self, committed: Mapping[str, int]) -> Pages:
        """The pages that have all their tokens now. They are no longer being filled.

        committed: rid -> tokens with KV that will not be written again.
        """
        pool, done = self.pool, []
        for page, rid in list(self.filling.items()):
            if not pool.held[page] or pool.owner[page] != rid:
                del self.filling[page]
                continue
            position = int(pool.position[page])
            if 0 <= position <= committed.get(rid, -1) - pool.page_size:
                del self.filling[page]
                done.append(page)
        return np.array(done, dtype=np.int64)

    def sample(self, count: int) -> Pages:
        """The next ``count`` sealed pages. They take turns, so that none is left out."""
        pages = self.sealed.nonzero()[0]
        if len(pages) > count:
            begin = int(np.searchsorted(pages, self._cursor))
            pages = np.take(pages, range(begin, begin + count), mode="wrap")
        if len(pages):
            self._cursor = int(pages[-1]) + 1
        return pages

    def pages_of(self, tokens: int) -> int:
        """How many pages so many tokens are; at least one."""
        return max(1, tokens // self.pool.page_size)

    def chunks(self, pages: Pages) -> Iterator[Pages]:
        """``pages`` in pieces of CHUNK tokens."""
        count = self.pages_of(CHUNK)
        return (pages[i : i + count] for i in range(0, len(pages), count))

    def place(self, code: int) -> tuple[int, str, int]:
        """(layer of the model, "K", "V" or "KV", row in the page) of a code of ``KvPages``."""
        layer, part, row = self.kv.place(code)
        return self.layers[layer], part, row

    def buffer(self, code: int) -> tuple[int, str]:
        """(layer of the model, "K", "V" or "KV") of a code of ``KvPages.changed``."""
        layer, part = self.kv.buffer(code)
        return self.layers[layer], part


def to_device(indices: Pages, device: torch.device) -> torch.Tensor:
    """These indices on the device. Does not wait for its stream."""
    return torch.from_numpy(indices).to(device, non_blocking=True)


def layers_of(kvcache: Any, name: str) -> list[int]:
    """The numbers that the layers of one pool have in the model, in the pool's order."""
    mapping = getattr(kvcache, "layers_mapping", None)
    attending = getattr(kvcache, "full_attention_layer_id_mapping", None)
    if attending is not None:
        return sorted(attending, key=attending.__getitem__)
    if mapping is None:
        count = len(next(iter(buffers_of(kvcache).values())))
        return list(range(int(kvcache.start_layer), int(kvcache.start_layer) + count))
    mine = [(index, layer) for layer, (index, swa) in mapping.items() if swa == (name == "swa")]
    return [layer for _, layer in sorted(mine)]
