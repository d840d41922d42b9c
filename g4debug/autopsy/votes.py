"""Which address faulted, and which of the kernel's buffers it was meant for: all lanes vote.

Where the instruction that faulted is known, its pair of registers has the address of each lane.
Loads may run on while the fault is on its way, so such a register may have been written over; then
any pair of registers of any lane may still have the address, and the most frequent page wins.

The kernel's parameters have pointers to its buffers. An address far outside could be far from each
of them. Three things tell for which one it was meant: lanes that hold the number of the page or of
the token, other lanes whose address at the same place is inside that buffer, and, last, that it is
the nearest one below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g4debug.autopsy.core import Core, Grid, Warp
from g4debug.autopsy.images import Access
from g4debug.findings.memory_map import GIVEN_BACK, LARGEST, MemoryMap, MemoryRange

LOWEST, HIGHEST = 1 << 32, 1 << 47  # the addresses that CUDA gives to a process
MOST_LANES = 16_384  # that are looked at; a core dump of a whole H100 has 270,000
MOST_POINTERS = 256
SMALLEST = 1024  # a smaller number in a register says nothing: there are many


@dataclass(frozen=True)
class Pointer:
    """A buffer that a kernel got. buffer: what the map says that begins there, if anything."""

    address: int
    buffer: MemoryRange | None

    @property
    def is_kv(self) -> bool:
        return self.buffer is not None and self.buffer.is_kv


@dataclass(frozen=True)
class Vote:
    """What the lanes say.

    lanes: that were looked at. agree: so many of them have an address in the same page (without a
    KV buffer: in the same 2 MiB). exact: it is from the pair of registers of the instruction that
    faulted. base: the buffer that it was meant for, None if there is none. numbered: so many lanes
    hold the number of that page or token. inside: so many other lanes are in that buffer at the
    same pair. rivals: the other KV buffers of the kernel, if nothing but the distance tells.
    """

    lanes: int
    agree: int
    exact: bool
    address: int = -1
    base: Pointer | None = None
    numbered: int = 0
    inside: int = 0
    rivals: tuple[Pointer, ...] = ()

    @property
    def sure(self) -> bool:
        """True if more than the distance tells which buffer it was meant for."""
        return bool(self.numbered or self.inside)


def pointers(grid: Grid | None, memory: MemoryMap | None) -> tuple[Pointer, ...]:
    """The pointers among a kernel's parameters, in their order, each once."""
    if grid is None:
        return ()
    data = grid.parameters[: len(grid.parameters) // 8 * 8]
    starts = {r.start: r for r in reversed(memory.ranges)} if memory is not None else {}
    words = dict.fromkeys(int(w) for w in np.frombuffer(data, "<u8") if LOWEST <= w < HIGHEST)
    return tuple(Pointer(word, starts.get(word)) for word in words)[:MOST_POINTERS]


class Voters:
    """The registers of the lanes of a grid. faulted: which lanes were in a warp that faulted."""

    def __init__(self, core: Core, warps: Iterable[Warp]) -> None:
        parts, faulted, count = [], [], 0
        for warp in warps:
            if count >= MOST_LANES:
                break
            part = core.registers(warp)
            flagged = warp.lanes["exception"] != 0
            if not flagged.any():
                flagged = np.full(len(part), warp.error_pc >= 0)
            parts.append(part)
            faulted.append(flagged)
            count += len(part)
        width = max((part.shape[1] for part in parts), default=0)
        self.registers = np.zeros((count, width), "<u4")
        at = 0
        for part in parts:
            self.registers[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        self.faulted = np.concatenate(faulted) if faulted else np.zeros(0, bool)

    def pairs(self) -> Any:
        """Each register and the next one as a 64-bit number, uint64 [lanes, registers - 1]."""
        wide = self.registers.astype("<u8")
        return wide[:, :-1] | wide[:, 1:] << np.uint64(32)


def vote(
    voters: Voters, access: Access | None, among: Sequence[Pointer], memory: MemoryMap | None
) -> Vote:
    """The address that faulted, and the buffer that it was meant for.

    access: the instruction that faulted, None if it is not known. among: the kernel's pointers.
    """
    lanes = len(voters.registers)
    pairs = voters.pairs()
    if access is not None and access.register < pairs.shape[1]:
        column = pairs[:, access.register] + np.uint64(access.offset % (1 << 64))
        of = np.flatnonzero(voters.faulted)
        mapped = _mapped(column, memory)
        out = of[~mapped[of]]
        if len(out):
            return _exact(voters, column, out, of, mapped, among)
    return _anywhere(voters, pairs, among, memory, lanes)


def _exact(
    voters: Voters, column: Any, out: Any, of: Any, mapped: Any, among: Sequence[Pointer]
) -> Vote:
    """The vote of the lanes at the instruction. out: those with an address that is not mapped."""
    addresses = column[out]
    insiders = column[mapped] if mapped.any() else np.delete(column, out)
    scored = []
    for pointer in among:
        numbered = _numbered(voters.registers[out], addresses, pointer)
        inside = _inside(insiders, pointer, among)
        scored.append((numbered, inside, pointer))
    best = max(scored, key=lambda s: (s[0], s[1]), default=(0, 0, None))
    base: Pointer | None = best[2]
    rivals: tuple[Pointer, ...] = ()
    if not (best[0] or best[1]):
        base, rivals = _nearest(int(addresses.min()), among)
    agree, address = _most(addresses, base)
    return Vote(len(of), agree, True, address, base, best[0], best[1], rivals)


def _anywhere(
    voters: Voters, pairs: Any, among: Sequence[Pointer], memory: MemoryMap | None, lanes: int
) -> Vote:
    """The vote of every pair of registers: the page of a KV buffer that most lanes have."""
    usable = (pairs >= LOWEST) & (pairs < HIGHEST)
    row, column = np.nonzero(usable)
    addresses = pairs[row, column]
    keep = ~_mapped(addresses, memory)
    row, addresses = row[keep], addresses[keep]
    found: list[Vote] = []
    ordered = sorted(among, key=lambda p: p.address)
    starts = np.array([p.address for p in ordered], "<u8")
    # The nearest pointer below: else what is behind another buffer would be a far page.
    nearest = np.searchsorted(starts, addresses, "right") - 1
    for at, pointer in enumerate(ordered):
        mine = nearest == at
        if not pointer.is_kv or not mine.any():
            continue
        agree, address = _most(addresses[mine], pointer, row[mine])
        numbered = _numbered(voters.registers[row[mine]], addresses[mine], pointer)
        rivals = tuple(p for p in among if p.is_kv and p is not pointer)
        found.append(Vote(lanes, agree, False, address, pointer, numbered, 0, rivals))
    return max(found, key=lambda v: (v.agree, v.numbered), default=Vote(lanes, 0, False))


def _mapped(addresses: Any, memory: MemoryMap | None) -> Any:
    """Which addresses are in a buffer of the map, and so did not fault: bool of the same shape."""
    known = memory.ranges if memory is not None else ()
    live = sorted(
        (r.start, r.end)
        for r in known
        if r.what != GIVEN_BACK and 0 <= r.start < LARGEST and 0 <= r.nbytes < LARGEST
    )
    if not live:
        return np.zeros(addresses.shape, bool)
    starts, ends = np.array(live, "<u8").T
    # Ranges lie in each other: the furthest end of all that begin before an address counts.
    ends = np.maximum.accumulate(ends)
    at = np.searchsorted(starts, addresses, "right")
    return (at > 0) & (addresses < ends[np.maximum(at, 1) - 1])


def _numbered(registers: Any, addresses: Any, pointer: Pointer) -> int:
    """How many lanes hold the number of the page or token that their address is in."""
    b = pointer.buffer
    if b is None or not b.is_kv or not len(addresses):
        return 0
    offset = addresses.astype(np.int64) - b.start
    count = np.zeros(len(addresses), bool)
    for size in {b.page_bytes, max(1, b.page_bytes // b.page_size)}:
        number = offset // size
        telling = np.abs(number) >= SMALLEST
        low = (number & 0xFFFF_FFFF).astype("<u4")
        count |= telling & (registers == low[:, None]).any(axis=1)
    return int(count.sum())


def _inside(addresses: Any, pointer: Pointer, among: Sequence[Pointer]) -> int:
    """How many addresses are inside a buffer; one that the map does not know ends at the next."""
    if pointer.buffer is not None:
        end = pointer.buffer.end
    else:
        end = min((p.address for p in among if p.address > pointer.address), default=0)
        end = min(end or HIGHEST, pointer.address + (1 << 30))
    return int(((addresses >= pointer.address) & (addresses < end)).sum())


def _nearest(address: int, among: Sequence[Pointer]) -> tuple[Pointer | None, tuple[Pointer, ...]]:
    """The pointer that is nearest below an address, or else the nearest above; and its rivals."""
    below = [p for p in among if p.address <= address]
    base = max(below, key=lambda p: p.address) if below else None
    if base is None:
        base = min(among, key=lambda p: p.address, default=None)
    return base, tuple(p for p in among if p.is_kv and p is not base)


def _most(addresses: Any, base: Pointer | None, lanes: Any = None) -> tuple[int, int]:
    """How many lanes have an address in the most frequent page, and the lowest such address.

    Without a KV buffer, of 2 MiB in place of a page. lanes: the lane of each address, if a lane may
    have several.
    """
    b = base.buffer if base is not None and base.is_kv else None
    keys = addresses >> np.uint64(21) if b is None else _pages(addresses, b)
    keys = keys.astype(np.int64)
    once = keys if lanes is None else np.unique(np.stack([keys, lanes]), axis=1)[0]
    values, counts = np.unique(once, return_counts=True)
    page = values[int(counts.argmax())]
    return int(counts.max()), int(addresses[keys == page].min())


def _pages(addresses: Any, b: MemoryRange) -> Any:
    return (addresses.astype(np.int64) - b.start) // b.page_bytes
