"""The likely cause of KV that is not as it must be, from where it is wrong and who has the page."""

from __future__ import annotations

from g4debug.findings.record import PageEvent
from g4debug.ledger.page_history import said

_MEMORY = "a kernel writes out of bounds, or there is a memory error (see: nvidia-smi -q -d ECC)"


def cause_of_write(freed: PageEvent | None, still: str) -> str:
    """The cause of a write into a free page. still: live requests with the page in their rows."""
    if still:
        when = f": it was freed {said(freed)}" if freed is not None else ""
        return f"{still}, so the page was freed too early, and a request went on in it{when}"
    return (
        "no live request has the page in its row: a forward wrote through a stale page table or a "
        "stale out_cache_loc, perhaps for a request that was aborted; which one is not known"
    )


def cause_of_change(count: int, still: str) -> str:
    """The cause of a change of committed KV. count: buffers that changed. still: as above."""
    if count <= 1:
        return (
            "only one buffer of one layer changed, while writing a token changes all layers: "
            f"{_MEMORY}; which of the two is not known"
        )
    if still:
        return f"another request wrote into the page: {still}"
    return (
        "somebody else wrote a token into the page, through a wrong page table or out_cache_loc. "
        "No other live request has the page in its row, so who it was is not known"
    )


def cause_of_nan(layer: int, pool: str, first: bool, count: int) -> str:
    """The cause of NaN or Inf in new KV. first: it is the pool's first layer. count: bad rows."""
    if count == 1:
        return (
            "only one row of one buffer has it, while a forward would carry it on into all later "
            f"layers: {_MEMORY}; which of the two is not known"
        )
    if first:
        return (
            f"the first layer of the {pool} pool has it already: it was in the input of the model, "
            "in its weights, or in layers before it that are of the other pool; which of them is "
            "not known"
        )
    return (
        f"layer {layer} is the first one of the {pool} pool that has it, the layers of this pool "
        "before it are finite: it came up between them, or the attention read KV that is NaN "
        "(look for kv-changed); which of the two is not known"
    )
