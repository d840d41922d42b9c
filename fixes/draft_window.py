"""Keeps one token more of a sliding window, because the draft of FROZEN_KV_MTP still reads it.

Between two decode steps SGLang gives back the SWA pages behind the window
(``ScheduleBatch._evict_swa``). What it keeps is enough for the token that comes next, at position
L. The draft of FROZEN_KV_MTP asks from position L - 1, where the last token with KV is
(``set_frozen_kv_positions``): its window begins one token earlier. Up to 0.5.13 SGLang keeps a page
more, and nothing is missing. From 0.5.14 on that page is gone without a prefix cache, and from
0.5.15 to 0.5.18 with one, too (by reading). Where exactly whole pages lie behind the window of L,
the last of them holds that one token; it is given back, and the draft's sliding layers read page 0
in its place.

It needs a step that is scheduled while no forward is in flight: after a retraction, for instance.
Otherwise the scheduler knows fewer tokens than there are, and keeps more. The answers stay right,
because the target verifies them; the draft drafts worse for a step. Found by page-table, by
``repro/healthy.py --only small-pools-no-radix``.

The fix counts one token less when it is decided what lies behind the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source
from g4debug.speculation import draft_reads_target_kv

FREES = "sglang.srt.mem_cache.common.free_swa_out_of_window_slots"


def around_evict(
    call_next: Callable[..., Any], batch: Any, req: Any, pre_len: int, *args: Any, **kwargs: Any
) -> Any:
    """Around ``ScheduleBatch._evict_swa``. pre_len: the tokens that are done, of which those behind
    the window are given back."""
    if draft_reads_target_kv(batch) and batch.forward_mode.is_decode():
        pre_len -= 1
    return call_next(batch, req, pre_len, *args, **kwargs)


def still_broken() -> bool:
    """True if pages are given back up to the very beginning of the next token's window."""
    return "evict_threshold = pre_len - sliding_window_size\n" in source(FREES)


FIX = Fix(
    id="draft-window",
    title="pages that the draft of FROZEN_KV_MTP still reads are evicted one token later",
    seed="none; found by this project",
    upstream="none; 0.5.23 has the bug",
    needs=">=0.5.14",
    elsewhere={"<0.5.14": "SGLang keeps a page more behind the window"},
    still_broken=still_broken,
    hooks=(around("batch.evict_swa", around_evict),),
    purpose="correctness",
)
