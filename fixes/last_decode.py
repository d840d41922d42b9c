"""Spares the last decoding request, which SGLang kills while its own prompt has the SWA pages.

If a decode step finds no SWA page, SGLang retracts other requests, and then ends the last one with
HTTP 500: ``Out of memory even after retracting all other requests in the decode batch``. But its
prompt is in the prefix cache by then, as one node, and the request itself has that node locked
whole (see ``_window_lock``). On a pool of 768 tokens a prompt of 701 holds 704 of them on an
otherwise idle server, and its answer ends when the last page is full.

The fix acts only where SGLang is about to do that. It lets the request lock the window alone, so
that the rest can be evicted, and lets SGLang look again.

The pages that it sets free lie before the last window of the prompt. The forward of the prompt, the
last to read them, is over: SGLang processes its result before it schedules the second decode step,
and before the first one this fix does nothing.
"""

from __future__ import annotations

from typing import Any

from g4debug.fixes import _window_lock
from g4debug.fixes._last_decode import spares
from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

CACHE = "sglang.srt.mem_cache.swa_radix_cache.SWARadixCache"


def make_room(batch: Any, request: Any) -> bool:
    """Let the last request of a batch lock the window alone. False if nothing comes free by it."""
    return (
        _window_lock.has_it(batch.tree_cache)
        and request.decode_batch_idx >= 1
        and _window_lock.relock(batch.tree_cache, request)
    )


around_check = spares(make_room)


def still_broken() -> bool:
    """True if a lock on a leaf holds it whole, and a new leaf is not cut unless that is asked."""
    lock = source(f"{CACHE}.inc_lock_ref")
    return "swa_lock_size < self.sliding_window_size" in lock and "split" not in lock


FIX = Fix(
    id="last-decode",
    title="the last decoding request is not killed for SWA pages that its own prompt has locked",
    seed="none; found by this project",
    upstream="none; from 0.5.18 on SGLang has another prefix cache",
    needs=">=0.5.12,<0.5.18",
    elsewhere={">=0.5.18": "its prefix cache cuts a new leaf where the window begins"},
    still_broken=still_broken,
    hooks=(around("batch.check_decode_mem", around_check),),
    purpose="correctness",
)
