"""What kv-integrity knows of one KV pool: pages that are stamped, sealed, still being filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from g4debug.findings.record import PageEvent
from g4debug.ledger.ledger import Pages, PoolLedger
from g4debug.tracers.kv_integrity.kv_pages import KvPages
from g4debug.tracers.limits import moving_pages

CHUNK = 64  # pages read at a time: the device needs scratch of that many pages of one buffer


@dataclass
class Watched:
    """One pool. ``pool``: the ledger's; ``layers``: the model's number of each of its layers.

    stamped, sealed: bool [pages], as on the device once it has caught up. sealed_at, checked_at:
    int64 [pages], the step in which a page was sealed, and last compared. filling: page -> rid,
    of pages that were handed out and are not complete yet.
    """

    pool: PoolLedger
    kv: KvPages
    layers: list[int]
    filling: dict[int, str] = field(default_factory=dict)
    leaving: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _cursor: int = 0

    def __post_init__(self) -> None:
        self.stamped = np.zeros(self.pool.pages, dtype=np.bool_)
        self.sealed = np.zeros(self.pool.pages, dtype=np.bool_)
        self.sealed_at = np.zeros(self.pool.pages, dtype=np.int64)
        self.checked_at = np.zeros(self.pool.pages, dtype=np.int64)

    def enter(self, event: PageEvent, pages: Pages) -> None:
        """An event of these pages, before the ledger enters it."""
        inside = self.pool.inside(pages)
        if event.kind in ("extend", "decode", "alloc"):
            self.stamped[inside] = False
            if event.request:
                self.filling.update(dict.fromkeys(inside.tolist(), event.request))
        elif event.kind in ("free", "evict"):
            # Only what is held: a page that is freed twice is somebody else's by now.
            self.leaving = np.unique(inside[self.pool.held[inside]])
        elif event.kind == "clear":
            self.forget()

    def gone(self) -> tuple[Pages, Pages]:
        """(pages that the last free took, those of them that were sealed): to be stamped now."""
        leaving, self.leaving = self.leaving, np.empty(0, dtype=np.int64)
        gone = leaving[~self.pool.held[leaving]]  # a tracer may have kept some
        sealed = gone[self.sealed[gone]]
        self.sealed[gone] = False
        self.stamped[gone] = True
        for page in gone.tolist():
            self.filling.pop(page, None)
        return gone, sealed

    def forget(self) -> None:
        """The allocator was cleared; the memory may even have been given back."""
        self.stamped[:] = self.sealed[:] = False
        self.filling.clear()
        self.kv.stamped.zero_()

    def on_device(self, pages: Pages) -> torch.Tensor:
        return to_device(pages, self.kv.device)

    def completed(self, committed: Mapping[str, int]) -> Pages:
        """Pages that have all of their tokens now; they are no longer being filled.

        committed: rid -> tokens whose KV is written and will not be written again.
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
        """The next sealed pages in turn: each one's turn comes."""
        pages = self.sealed.nonzero()[0]
        if len(pages) > count:
            begin = int(np.searchsorted(pages, self._cursor))
            pages = np.take(pages, range(begin, begin + count), mode="wrap")
        if len(pages):
            self._cursor = int(pages[-1]) + 1
        return pages

    def place(self, code: int) -> tuple[int, str, int]:
        """(the model's layer, "K" or "V", row in the page) of a code of KvPages."""
        buffer, row = self.kv.place(code)
        return self.layers[buffer // 2], "KV"[buffer % 2], row

    def buffer(self, code: int) -> tuple[int, str]:
        """(the model's layer, "K" or "V") of a code of ``KvPages.changed``."""
        return self.layers[(code - 1) // 2], "KV"[(code - 1) % 2]


def to_device(indices: Pages, device: torch.device) -> torch.Tensor:
    # A copy that may block waits for all that is queued on the stream.
    return torch.from_numpy(indices).to(device, non_blocking=True)


def limits(server_args: Any) -> list[str]:
    """Why KV cannot be judged on this server; empty if it can."""
    found = moving_pages(server_args)
    for name, why in (
        ("enable_hierarchical_cache", "the hierarchical cache copies KV on streams of its own"),
        ("enable_hisparse", "HiSparse exchanges KV under a page"),
        ("dllm_algorithm", "a diffusion model rewrites KV that it committed"),
    ):
        if getattr(server_args, name, None):
            found.append(why)
    return found


def layers_of(kvcache: Any, name: str) -> list[int]:
    """The model's numbers of the layers of one pool, in the pool's order."""
    mapping = getattr(kvcache, "layers_mapping", None)
    if mapping is None:
        return list(
            range(int(kvcache.start_layer), int(kvcache.start_layer) + len(kvcache.k_buffer))
        )
    mine = [(index, layer) for layer, (index, swa) in mapping.items() if swa == (name == "swa")]
    return [layer for _, layer in sorted(mine)]


def chunks(pages: Pages) -> Iterator[Pages]:
    """``pages`` in pieces of CHUNK."""
    return (pages[i : i + CHUNK] for i in range(0, len(pages), CHUNK))
