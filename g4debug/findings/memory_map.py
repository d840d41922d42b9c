"""The memory map: which address range holds what, as the host knew it while all was well.

A log or a CUDA core dump names an address. With the map of the process that had it, it is a page of
a layer's K, a weight, or nothing at all. The map is plain values, so it is in every dump.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

# What a range holds, from the most to the least that its name says. Ranges may lie in each other.
KV = "KV"
SEGMENT = "segment"  # of PyTorch's caching allocator; whatever lies in it has ranges of its own
LARGEST = 1 << 62  # a larger address or size is no real one
GIVEN_BACK = "segment that was given back"  # to CUDA: an address in it is mapped no more


@dataclass(frozen=True)
class MemoryRange:
    """One buffer, or one segment of the caching allocator. Unknown: 0, -1 or ''."""

    start: int  # address
    nbytes: int
    what: str  # "KV", "page table", "token list", "req_to_token", "mapping", "weights", "segment"
    name: str = ""  # "layers.3", "decode_cuda_graph_metadata.page_table", "graph's private pool"
    pool: str = ""  # "full" or "swa", of KV
    runner: str = ""  # "target" or "draft"
    layer: int = -1  # layer id, of KV
    part: str = ""  # "K", "V" or "KV", of KV
    dtype: str = ""  # "bfloat16"
    page_bytes: int = 0  # of KV
    page_size: int = 0  # tokens of a page, of KV

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def pages(self) -> int:
        """Pages of a KV buffer with the reserved page 0, so valid pages are 0..pages-1."""
        return self.nbytes // self.page_bytes if self.page_bytes > 0 else 0

    @property
    def is_kv(self) -> bool:
        """A KV buffer whose pages are known; its numbers may come from a stranger's dump."""
        sizes = 0 < self.page_size <= self.page_bytes <= self.nbytes < LARGEST
        return self.what == KV and sizes and 0 < self.start < LARGEST

    def page_at(self, address: int) -> tuple[int, int]:
        """(page, token in it) of an address, counted from this KV buffer's begin, in or out of it.

        In front of the buffer the page is negative.
        """
        page, rest = divmod(address - self.start, self.page_bytes)
        return page, rest * self.page_size // self.page_bytes

    def __str__(self) -> str:
        """For example ``K of layer 22 (swa pool)``."""
        if self.what == KV:
            draft = ", the draft's own" if self.runner == "draft" else ""
            return f"{self.part} of layer {self.layer} ({self.pool} pool{draft})"
        name = f" {self.name}" if self.name else ""
        of = f" of the {self.runner}" if self.runner else ""
        return f"{self.what}{name}{of}"


@dataclass(frozen=True)
class MemoryMap:
    """The ranges of one process, sorted by address."""

    ranges: tuple[MemoryRange, ...]
    step: int = -1  # the step in which it was made last
    device: str = ""  # "cuda:0", "cpu"
    segments: bool = False  # whether it has the allocator's segments, so "nowhere" can be said
    left_out: int = 0  # small ranges that had no room

    @cached_property
    def kv(self) -> tuple[MemoryRange, ...]:
        return tuple(r for r in self.ranges if r.is_kv)

    def at(self, address: int) -> tuple[MemoryRange, ...]:
        """The ranges that an address lies in, the smallest first."""
        found = [r for r in self.ranges if r.start <= address < r.end]
        return tuple(sorted(found, key=lambda r: (r.nbytes, r.what == SEGMENT)))

    def below(self, address: int) -> MemoryRange | None:
        """The KV buffer that begins nearest below an address; None if there is none."""
        kv = self.kv
        at = bisect.bisect_right([r.start for r in kv], address)
        return kv[at - 1] if at else None

    def above(self, address: int) -> MemoryRange | None:
        """The KV buffer that begins nearest above an address; None if there is none."""
        return next((r for r in self.kv if r.start > address), None)


def make(
    ranges: Iterable[MemoryRange], most: int, step: int, device: str, segments: bool
) -> MemoryMap:
    """A map of at most ``most`` ranges beside the KV buffers; the smallest are left out.

    Of two equal buffers the first one names it: the draft of FROZEN_KV_MTP reads the target's KV.
    """
    first: dict[tuple[int, int, bool], MemoryRange] = {}
    for r in ranges:
        if r.nbytes > 0:
            first.setdefault((r.start, r.nbytes, r.what == SEGMENT), r)
    kv = [r for r in first.values() if r.what == KV]
    rest = sorted((r for r in first.values() if r.what != KV), key=lambda r: -r.nbytes)
    kept = sorted((*kv, *rest[:most]), key=lambda r: (r.start, -r.nbytes))
    return MemoryMap(tuple(kept), step, device, segments, max(0, len(rest) - most))
