"""An address in words, by the memory map."""

from __future__ import annotations

from g4debug.findings.memory_map import GIVEN_BACK, SEGMENT, MemoryMap, MemoryRange

FAR = 1 << 40  # bytes; nothing is said to be behind or in front of a buffer that is further away


def size(nbytes: int) -> str:
    """For example ``1.5 MiB``."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} bytes"


def inside(r: MemoryRange, address: int, rounded: int = 0) -> str:
    """``page 5 of K of layer 22 (swa pool), token 3``, or what else it is in."""
    if r.is_kv:
        page, token = _page(r, address, rounded)
        return f"{page} of {r}{token}; it has pages 0 to {r.pages - 1}"
    if r.what in (SEGMENT, GIVEN_BACK):
        kind = "memory that was given back to CUDA" if r.what == GIVEN_BACK else "PyTorch's memory"
        return f"{kind}: a segment of {size(r.nbytes)} with {r.name or 'nothing that is known'}"
    return f"{r}, {size(address - r.start)} from its begin"


def page(r: MemoryRange, number: int) -> str:
    """``page 384 of K, layer 22 (the SWA pool has pages 0 to 372)``."""
    name = "SWA" if r.pool == "swa" else r.pool
    pool = f"the draft's own {name}" if r.runner == "draft" else f"the {name}"
    return f"page {number} of {r.part}, layer {r.layer} ({pool} pool has pages 0 to {r.pages - 1})"


def outside(r: MemoryRange, address: int, rounded: int = 0) -> str:
    """``page 384 behind K of layer 22 (swa pool), which has 373 pages``."""
    page, token = _page(r, address, rounded)
    where = "in front of" if address < r.start else "behind"
    return f"{where} {r}: {page}{token}, where it has pages 0 to {r.pages - 1}"


def _page(r: MemoryRange, address: int, rounded: int) -> tuple[str, str]:
    """The KV page and the token of an address; of one that was rounded down, the pages."""
    page, token = r.page_at(address)
    if not rounded:
        return f"page {page}", f", token {token}"
    last, _ = r.page_at(address + rounded - 1)
    return (f"page {page}" if last == page else f"pages {page} to {last}"), ""


def words(address: int, memory: MemoryMap, rounded: int = 0) -> str:
    """What an address is, in one sentence without its full stop.

    rounded: bytes from the address on in which the right one lies, 0 if this is it.
    """
    found = memory.at(address)
    live = [r for r in found if r.what != GIVEN_BACK]
    if live:
        below = memory.below(address)
        if live[0].what == SEGMENT and below is not None and live[0].start <= below.start:
            return (
                f"{outside(below, address, rounded)}; still in the same segment of PyTorch's memory"
            )
        first = inside(live[0], address, rounded)
        return first if live[0].is_kv else f"not a KV page: in {first}"
    near = memory.below(address)
    if near is None or address - near.end > FAR:
        above = memory.above(address)
        near = above if above is not None and above.start - address <= FAR else None
    behind = (
        f"; the nearest KV buffer: it is {outside(near, address, rounded)}"
        if near is not None
        else ""
    )
    if found:
        return f"not mapped any more: in {inside(found[0], address, rounded)}{behind}"
    made = f" of step {memory.step}" if memory.step >= 0 else ""
    nowhere = "in no buffer and no segment" if memory.segments else "in no buffer"
    nowhere += f" of the map{made}" if made or memory.left_out or not memory.segments else ""
    return f"{nowhere}{behind}"
