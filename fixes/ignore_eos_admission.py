"""Admits a request with ``ignore_eos`` that an idle server refuses for ever, for want of one token.

Without a prefix cache (``--disable-radix-cache``), SGLang admits such a request only if the pool
has room for its prompt and for all that it will generate, and one token besides. When the request
comes, SGLang cuts its ``max_new_tokens`` to what the whole pool has room for: all but the prompt in
pages, one page and one token. These two agreed. By 0.5.21 the admission has begun to count one page
more for each request, and then lacks one token on an empty pool. The request waits for ever, and
everybody behind it: the scheduler turns, ``/health`` answers, nothing is logged. One that comes
back from a retraction may lack up to a page; this was computed, and not seen.

The fix acts where such a request is refused in two rounds in a row, and nothing else runs in
either. Then nobody can give anything back. It asks once more without that page, as SGLang did up to
0.5.18. All others are served as they always were.

Why the pool has room: nobody else holds a token of it. A prompt and an answer that SGLang has cut
so are at least a page and a token less than the pool; and so much is what SGLang itself admits,
where the same request does not set ``ignore_eos``. It asks for the same memory while it decodes,
with a draft and with overlap scheduling, too.
"""

from __future__ import annotations

from typing import Any

from g4debug.fixes._twice_refused import Ask, TwiceRefused
from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import exists, source

IGNORES = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req_ignore_eos"


def _serves(adder: Any, req: Any) -> bool:
    """True for a request that has to have room for all that it will generate.

    With a SWA pool, SGLang does not ask for that room.
    """
    ignores = req.sampling_params.ignore_eos and getattr(adder.tree_cache, "disable", True)
    return bool(ignores and type(adder.memory_budget).__name__ == "PrefillBudget")


def _ask_again(adder: Any, req: Any, ask: Ask) -> None:
    budget, page = adder.memory_budget, adder.per_req_token_overhead
    adder.req_states = None  # else it counts the request twice
    budget.current_offset -= page
    try:
        ask()
    finally:
        budget.current_offset += page


around_add = TwiceRefused(_serves, _ask_again)


def still_broken() -> bool:
    """True if the page that is counted for each request is taken from that room."""
    if not exists(IGNORES):
        return False
    text = source(IGNORES)
    return "per_req_token_overhead" in text and "self.cur_rem_tokens - paged_input" in text


FIX = Fix(
    id="ignore-eos-admission",
    title="an idle server admits a request with ignore_eos whose answer may fill the pool",
    seed="none; found by this project",
    upstream="no report known; 0.5.23 has the bug",
    needs=">=0.5.21",
    elsewhere={"<0.5.21": "SGLang counts no page more for each request there"},
    still_broken=still_broken,
    hooks=(around("adder.add", around_add),),
    purpose="correctness",
)
