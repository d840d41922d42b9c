"""The memory map: which address range holds what, as the host knew it while all was well.

A log or a CUDA core dump names an address. With the map of the process that had it, it is a page of
a layer's K, a weight, or nothing at all. The map is plain values, so it is in every dump.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

# What a range holds, from the most to the least that its name says. Ranges may lie in each other.
KV = "KV"
SEGMENT = "segment"  # of PyTorch's caching allocator; whatever lies in it has ranges of its own
WEIGHTS = "weights"
INDEXES = ("req_to_token", "mapping", "page table", "token list")  # what page numbers are read from
LARGEST = 1 << 62  # a larger address or size is no real one
GIVEN_BACK = "segment that was given back"  # to CUDA: an address in it is mapped no more
NO_ROOM = "what had no room in the map"  # the name of a segment of which only the place is known

# How many ranges a map keeps beside the KV buffers: the black box has room for them, too. What a
# kind does not need of its share goes to the others, to the first in this order first.
SHARES = {"index": 96, SEGMENT: 128, WEIGHTS: 64, "other": 32}
MOST_BARE = 500  # places of segments of which there is no more than the place; 36 bytes each
GAP = 512  # bytes between weights that lie behind each other: the allocator's alignment


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
    # Whether it has the places of all of the allocator's segments, so "nowhere" can be said.
    segments: bool = False
    left_out: int = 0  # buffers and weights that had no room
    # Segments that had no room: the begin and the end of each, in one row. They overlap nothing.
    bare: tuple[int, ...] = ()

    @cached_property
    def kv(self) -> tuple[MemoryRange, ...]:
        return tuple(r for r in self.ranges if r.is_kv)

    @cached_property
    def known(self) -> tuple[MemoryRange, ...]:
        """All ranges, with the segments of which only the place is known."""
        places = zip(self.bare[::2], self.bare[1::2], strict=False)
        return *self.ranges, *(MemoryRange(a, b - a, SEGMENT, NO_ROOM) for a, b in places)

    def at(self, address: int) -> tuple[MemoryRange, ...]:
        """The ranges that an address lies in, the smallest first."""
        found = [r for r in self.known if r.start <= address < r.end]
        return tuple(sorted(found, key=lambda r: (r.nbytes, r.what == SEGMENT)))

    def below(self, address: int) -> MemoryRange | None:
        """The KV buffer that begins nearest below an address; None if there is none."""
        kv = self.kv
        at = bisect.bisect_right([r.start for r in kv], address)
        return kv[at - 1] if at else None

    def above(self, address: int) -> MemoryRange | None:
        """The KV buffer that begins nearest above an address; None if there is none."""
        return next((r for r in self.kv if r.start > address), None)


def make(ranges: Iterable[MemoryRange], step: int, device: str, segments: bool) -> MemoryMap:
    """A map of all KV buffers, and of as many other ranges as ``SHARES`` has room for.

    Of each kind the largest are kept; weights that touch are one range where not all have room. Of
    a segment that has no room its place stays, because an address is only known to be mapped
    nowhere if all of them are known. Of two equal buffers the first one names it: the draft of
    FROZEN_KV_MTP reads the target's KV. segments: whether ``ranges`` has all segments.
    """
    first: dict[tuple[int, int, bool], MemoryRange] = {}
    for r in ranges:
        if r.nbytes > 0:
            first.setdefault((r.start, r.nbytes, r.what == SEGMENT), r)
    kv = [r for r in first.values() if r.what == KV]
    kinds: dict[str, list[MemoryRange]] = {kind: [] for kind in SHARES}
    for r in sorted(first.values(), key=lambda r: -r.nbytes):
        if r.what != KV:
            kinds[_kind(r)].append(r)
    if sum(map(len, kinds.values())) > sum(SHARES.values()):
        kinds[WEIGHTS] = sorted(_touching(kinds[WEIGHTS]), key=lambda r: -r.nbytes)
    free = sum(max(0, share - len(kinds[kind])) for kind, share in SHARES.items())
    kept, left_out = kv, 0
    placed: list[MemoryRange] = []
    for kind, share in SHARES.items():
        more = min(free, max(0, len(kinds[kind]) - share))
        free -= more
        kept = [*kept, *kinds[kind][: share + more]]
        rest = kinds[kind][share + more :]
        if kind == SEGMENT:
            placed = rest
        else:
            left_out += len(rest)
    bare = _bare(placed)
    if len(bare) > 2 * MOST_BARE:
        bare, segments = bare[: 2 * MOST_BARE], False
    kept.sort(key=lambda r: (r.start, -r.nbytes))
    return MemoryMap(tuple(kept), step, device, segments, left_out, bare)


def _kind(r: MemoryRange) -> str:
    if r.what in INDEXES:
        return "index"
    return r.what if r.what in SHARES else "other"


def _touching(weights: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Weights of one model that lie behind each other as one: ``layers.3 to layers.5``."""
    joined: list[MemoryRange] = []
    for r in sorted(weights, key=lambda r: r.start):
        last = joined[-1] if joined else None
        if last is not None and last.runner == r.runner and r.start - last.end <= GAP:
            begin = last.name.partition(" to ")[0]
            name = begin if begin == r.name else f"{begin} to {r.name}"
            dtype = r.dtype if r.dtype == last.dtype else ""
            nbytes = max(last.end, r.end) - last.start
            r = dataclasses.replace(r, start=last.start, nbytes=nbytes, name=name, dtype=dtype)
            joined.pop()
        joined.append(r)
    return joined


def _bare(segments: Iterable[MemoryRange]) -> tuple[int, ...]:
    """Begin and end of each; those that touch are one."""
    places: list[int] = []
    for r in sorted(segments, key=lambda r: r.start):
        if places and r.start <= places[-1]:
            places[-1] = max(places[-1], r.end)
        else:
            places += r.start, r.end
    return tuple(places)
