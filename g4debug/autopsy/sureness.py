"""How sure an autopsy is, in sentences: the lanes that agree, and what else it could be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from g4debug.autopsy import images, places, votes
from g4debug.autopsy.votes import Vote

SHOWN = 8  # rows that are named


def of_vote(vote: Vote, place: images.Place) -> Iterator[str]:
    """How sure the address is, and how sure the buffer that it was meant for."""
    if vote.address < 0:
        return
    lanes = f"{vote.agree} of the {vote.lanes} lanes that faulted"
    base = vote.base.buffer if vote.base is not None else None
    near = "in that page" if base is not None and base.is_kv else "less than 2 MiB from it"
    if vote.exact and place.access is not None:
        a = place.access
        yield (
            f"{lanes} hold an address {near} in registers R{a.register} and R{a.register + 1}, "
            f"from which the instruction that faulted ({a.name}) takes its address"
        )
    else:
        yield (
            f"{lanes} hold an address {near}, but not where the instruction that faulted takes its "
            "address from: that was written over since, or is not known"
        )
    if vote.agree < vote.lanes:
        yield (
            f"of the other lanes, {vote.outside - vote.agree} hold an address there that is "
            f"outside of all memory, too, and {vote.lanes - vote.outside} hold none"
        )
    if vote.numbered:
        least = "at least " if not vote.exact and vote.lanes > votes.MOST_COMPARED else ""
        yield f"{least}{vote.numbered} of these lanes also hold the page's or the token's number"
    if vote.inside:
        yield (
            f"{vote.inside} other lanes at that instruction have an address inside of that buffer "
            "in these registers"
        )
    if vote.given and base is not None:
        page, _ = base.page_at(vote.address)
        yield f"the dump's events gave page {page} to the request, and no other that it may be"
    for p in vote.same:
        if p.buffer is not None:
            number, _ = (base or p.buffer).page_at(vote.address)
            yield f"they also hold an address in page {number} of {p.buffer}"
    rivals = [p.buffer for p in vote.rivals if p not in vote.same and p.buffer is not None]
    if not vote.whole:
        yield (
            "the map has not all of PyTorch's segments: an address in one that it lacks looks as "
            "if it had faulted"
        )
    if not vote.sure and rivals:
        others = " or ".join(places.page(r, r.page_at(vote.address)[0]) for r in rivals[:3])
        yield f"only the distance tells which buffer was meant; it may also be {others}"


def of_registers(vote: Vote, place: images.Place) -> Iterator[str]:
    """What the registers of the instruction hold. Without a map nobody knows if that faulted."""
    if vote.address < 0 or place.access is None:
        return
    a = place.access
    yield (
        f"{vote.agree} of the {vote.lanes} lanes that faulted hold {vote.address:#x}, or an "
        f"address less than 2 MiB from it, in registers R{a.register} and R{a.register + 1}, from "
        f"which the instruction that faulted ({a.name}) takes its address. They may have been "
        "written over since, so it may be another address that faulted"
    )


def of_others(blocks: Mapping[tuple[int, int, int], int]) -> Iterator[str]:
    """The blocks that faulted for another row than the one that is told. blocks: block -> row."""
    if blocks:
        also = sorted(set(blocks.values()) - {-1})[:SHOWN]
        of = f", of the row{'s' * (len(also) > 1)} {', '.join(map(str, also))}" if also else ""
        yield f"{len(blocks)} more block{'s' * (len(blocks) > 1)} of this kernel faulted, too{of}"
