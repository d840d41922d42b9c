"""Which address faulted, and which of the kernel's buffers it was meant for: all lanes vote.

Where the instruction that faulted is known, its pair of registers has the address of each lane. But
a warp runs on until the fault reaches it, so the registers may have been written over: then other
pairs of the same lanes may still have an address in that page. If all lanes have one, it is told.
If not, the page is not known, and that is said.

The kernel's parameters have pointers to its buffers. An address far outside is far from each of
them. Three things tell for which one it was meant: lanes that hold the number of the page or of the
token, other lanes that stand at the same instruction and whose address there is inside that buffer,
and, last, the distance. Elsewhere in the kernel the same registers hold something else, so other
lanes say nothing; and lanes that point into two buffers tell neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g4debug.autopsy.core import Core, Grid, Warp
from g4debug.autopsy.images import Access
from g4debug.findings.memory_map import GIVEN_BACK, LARGEST, SEGMENT, MemoryMap, MemoryRange

LOWEST, HIGHEST = 1 << 32, 1 << 49  # the addresses of a GPU; below are CUDA's own
MOST_LANES = 16_384  # that are looked at; a core dump of a whole H100 has 270,000
MOST_POINTERS = 256
MOST_COMPARED = 1024  # lanes in which the number of a page is looked for, where any register counts
MOST_LOOKS = 1000  # times that it is looked for there
SMALL = 1 << 20  # the low half of an address is below this only once in 4,096 times
DIFFERENT = 4  # addresses of the lanes that read a page
WIDEST = 16  # bytes of the widest access of a lane
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

    lanes: of the warps that faulted. agree: so many of them have an address in the same page
    (without a KV buffer: in the same 2 MiB). outside: so many have an address there that no range
    of the map has, in whatever page. exact: it is from the pair of registers of the
    instruction that faulted. base: the buffer that it was meant for, None if there is none.
    numbered: so many lanes hold the number of that page or token. inside: so many other lanes at
    the same instruction are in that buffer at the same pair. rivals: other buffers of the kernel
    that it may have been meant for. same: of these, those of which the lanes hold an address in the
    same page, too.
    given: the dump's events give the request a page of that number, and of no rival's.
    reads: the KV buffer that the instruction reads, if its registers have moved on.
    whole: the map has all of PyTorch's segments. Without one of them, an address in it looks as if
    it had faulted.
    """

    lanes: int
    agree: int = 0
    outside: int = 0
    exact: bool = False
    address: int = -1
    base: Pointer | None = None
    numbered: int = 0
    inside: int = 0
    rivals: tuple[Pointer, ...] = ()
    same: tuple[Pointer, ...] = ()
    reads: Pointer | None = None
    given: bool = False
    whole: bool = True

    @property
    def few(self) -> bool:
        """True if so few lanes agree that another address may be the one that faulted: fewer than
        read any page together, or fewer than half of those whose address is outside of all memory.
        """
        return self.agree < DIFFERENT or 2 * self.agree < self.outside

    @property
    def sure(self) -> bool:
        """True if more than the distance tells which buffer it was meant for."""
        if self.numbered or self.given:
            return True
        return self.whole and bool(self.inside or self.same or not self.rivals)


def pointers(grid: Grid | None, memory: MemoryMap | None) -> tuple[Pointer, ...]:
    """The pointers among a kernel's parameters, in their order, each once.

    Two small numbers beside each other look like a pointer, too. So one counts only if it is where
    this process has memory.
    """
    if grid is None or memory is None or not memory.ranges:
        return ()
    data = grid.parameters[: len(grid.parameters) // 8 * 8]
    known = [r for r in memory.ranges if 0 < r.start < LARGEST and 0 < r.nbytes < LARGEST]
    starts = {r.start: r for r in sorted(known, key=_says, reverse=True)}
    words = np.unique(np.frombuffer(data, "<u8"))
    if memory.segments:
        words = words[_mapped(words, memory)]
    else:
        low, high = min(starts, default=0), max((r.end for r in known), default=0)
        words = words[(words >= low) & (words < high)]
    return tuple(Pointer(int(w), starts.get(int(w))) for w in words[:MOST_POINTERS])


def _says(r: MemoryRange) -> tuple[bool, bool, int]:
    """Orders ranges of one address: what says most of it is first."""
    return not r.is_kv, r.what in (SEGMENT, GIVEN_BACK), r.nbytes


class Voters:
    """The registers of the lanes of a grid.

    faulted: which lanes were in a warp that faulted. beside: which lanes stand at an instruction at
    which one of these stands, too.
    """

    def __init__(self, core: Core, warps: Iterable[Warp]) -> None:
        parts, faulted, pcs, count = [], [], [], 0
        for warp in warps:
            if count >= MOST_LANES:
                break
            part = core.registers(warp)
            flagged = warp.lanes["exception"] != 0
            if not flagged.any():
                flagged = np.full(len(part), warp.error_pc >= 0)
            parts.append(part)
            faulted.append(flagged)
            pcs.append(warp.lanes["pc"])
            count += len(part)
        width = max((part.shape[1] for part in parts), default=0)
        self.registers = np.zeros((count, width), "<u4")
        at = 0
        for part in parts:
            self.registers[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        self.faulted = np.concatenate(faulted) if faulted else np.zeros(0, bool)
        where = np.concatenate(pcs) if pcs else np.zeros(0, "<u8")
        self.beside = np.isin(where, where[self.faulted])

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
    whole = memory is not None and memory.segments
    found = _vote(voters, access, among, memory)
    return dataclasses.replace(found, whole=whole)


def _vote(
    voters: Voters, access: Access | None, among: Sequence[Pointer], memory: MemoryMap | None
) -> Vote:
    pairs = voters.pairs()
    lanes = int(voters.faulted.sum())
    reads = None
    if access is not None and access.register < pairs.shape[1]:
        column = pairs[:, access.register] + np.uint64(access.offset % (1 << 64))
        mapped = _mapped(column, memory)
        whole = voters.faulted & ~mapped & _whole(column)
        if whole.any():
            inside = column[mapped & voters.beside]
            return _exact(voters.registers[whole], column[whole], inside, among, lanes)
        moved = column[voters.faulted & mapped]
        reads = next((p for p in among if p.is_kv and _inside(moved, p)), None)
    found = _anywhere(voters, pairs[voters.faulted], among, memory, lanes)
    return dataclasses.replace(found, reads=reads)


def misaligned(
    voters: Voters, access: Access | None, memory: MemoryMap
) -> tuple[int, int, int, int] | None:
    """(address, alignment, agree, lanes) of an access that is not aligned; None if it is not known.

    Of the addresses in the registers of the instruction that faulted, the one that is a multiple of
    the smallest power of two, which is the alignment in bytes. agree: so many of the lanes that
    faulted have a mapped address there that is no multiple of ``WIDEST``.
    """
    if access is None or access.register >= voters.registers.shape[1] - 1:
        return None
    column = voters.pairs()[voters.faulted, access.register] + np.uint64(access.offset % (1 << 64))
    odd = column[_mapped(column, memory) & (column % np.uint64(WIDEST) != 0)]
    if not len(odd):
        return None
    alignment = odd & (~odd + np.uint64(1))
    least = int(alignment.min())
    return int(odd[alignment == least].min()), least, len(odd), len(column)


def _exact(
    registers: Any, addresses: Any, others: Any, among: Sequence[Pointer], lanes: int
) -> Vote:
    """The vote of the lanes at the instruction, by their addresses, which are not mapped.

    others: the addresses of other lanes at that instruction, which are mapped.
    """
    scored = [(_numbered(registers, addresses, p), _inside(others, p), p) for p in among]
    numbered, inside, base = max(scored, key=lambda s: (s[0], s[1]), default=(0, 0, None))
    rest = [(n, i) for n, i, p in scored if p is not base]
    if numbered:
        tells = all(r < (numbered, inside) for r in rest)
    else:
        tells = inside > 0 and not any(i for _, i in rest)
    rivals: tuple[Pointer, ...] = ()
    if not tells:
        numbered = inside = 0
        base = _nearest(int(addresses.min()), among)
        rivals = tuple(p for p in among if p.is_kv and p is not base)
    agree, address = _most(addresses, base)
    return Vote(lanes, agree, len(addresses), True, address, base, numbered, inside, rivals)


def _anywhere(
    voters: Voters, pairs: Any, among: Sequence[Pointer], memory: MemoryMap | None, lanes: int
) -> Vote:
    """The vote of every pair of registers: a page in which all lanes that faulted have an address.

    pairs: of these lanes. The addresses of the lanes differ, because each reads a part of a page; a
    number that all of them have is something else.
    """
    found: list[tuple[int, int, Pointer]] = []  # lanes with the page's number, address, buffer
    kv = [(p, p.buffer) for p in among if p.buffer is not None and p.is_kv]
    usable = (_whole(pairs) & ~_mapped(pairs, memory)).all(axis=0) if len(pairs) and kv else ()
    registers = voters.registers[voters.faulted][:MOST_COMPARED]
    room = MOST_LOOKS
    for column in np.flatnonzero(usable):
        addresses = np.unique(pairs[:, column])
        if len(addresses) < DIFFERENT:
            continue
        low, high = int(addresses[0]), int(addresses[-1])
        nearest = _nearest(low, among)
        for p, b in kv:
            if b.page_at(low)[0] != b.page_at(high)[0]:
                continue
            room -= 1
            some = pairs[:MOST_COMPARED, column]
            # Without a look no lane counts as one that has the number: then it is less sure.
            numbered = _numbered(registers, some, p) if room >= 0 else 0
            # A segment that the map lacks has addresses that are near a buffer, too.
            near = nearest is p and memory is not None and memory.segments
            if numbered or near:
                found.append((numbered, low, p))
    if not found:
        return Vote(lanes)
    pages = {(_page(address, p), p.address): p for _, address, p in found}
    if len({page for page, _ in pages}) > 1:  # then only the number of a page tells
        found = [f for f in found if f[0] == max(n for n, _, _ in found)]
    numbered, address, base = max(found, key=lambda f: f[0])
    page = _page(address, base)
    if any(_page(a, p) != page for n, a, p in found):
        return Vote(lanes)
    same = tuple({p.address: p for _, _, p in found if p is not base}.values())
    lowest = min(a for _, a, p in found if p is base)
    # Without the page's number only the distance has told which buffer it is.
    rivals = same if numbered or same else tuple(p for p, _ in kv if p is not base)
    return Vote(lanes, lanes, lanes, False, lowest, base, numbered, 0, rivals, same)


def _whole(addresses: Any) -> Any:
    """Which numbers can be an address of which no half was written over with a small number."""
    low = addresses & np.uint64(0xFFFF_FFFF)
    return (addresses >= LOWEST) & (addresses < HIGHEST) & (low >= SMALL)


def _mapped(addresses: Any, memory: MemoryMap | None) -> Any:
    """Which addresses are in a buffer of the map, and so did not fault: bool of the same shape."""
    known = memory.known if memory is not None else ()
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


def _inside(addresses: Any, p: Pointer) -> int:
    """How many addresses are inside a KV buffer."""
    b = p.buffer
    if b is None or not b.is_kv:
        return 0
    return int(((addresses >= b.start) & (addresses < b.end)).sum())


def _nearest(address: int, among: Sequence[Pointer]) -> Pointer | None:
    """The pointer whose buffer is nearest: behind its end, or in front of its begin."""

    def distance(p: Pointer) -> int:
        end = p.address if p.buffer is None else p.buffer.end
        return p.address - address if address < p.address else max(0, address - end)

    return min(among, key=distance, default=None)


def _page(address: int, p: Pointer) -> int:
    return p.buffer.page_at(address)[0] if p.buffer is not None else -1


def _most(addresses: Any, base: Pointer | None) -> tuple[int, int]:
    """How many have the most frequent page, and the lowest of these. Without KV, of 2 MiB."""
    b = base.buffer if base is not None and base.is_kv else None
    keys = addresses >> np.uint64(21) if b is None else _pages(addresses, b)
    values, counts = np.unique(keys, return_counts=True)
    page = values[int(counts.argmax())]
    return int(counts.max()), int(addresses[keys == page].min())


def _pages(addresses: Any, b: MemoryRange) -> Any:
    return (addresses.astype(np.int64) - b.start) // b.page_bytes
