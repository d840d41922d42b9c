"""Admits a request that an idle server refuses for ever for want of SWA pages (sglang #32379).

Before a request is admitted, SGLang holds what its next chunk needs against the SWA pages that are
free or could be evicted. Then it locks the request's cached prefix, which takes pages away from
those, and looks again. Two things make the second look fail although the pool has room:

* The lock covers whole nodes of the prefix cache, back to the one in which the sliding window
  begins. A node of one long prompt is then locked whole, far behind the window.
* The need is at least one window and one page, however short the rest of the prompt is, and the
  chunk is never made shorter.

On a busy server that ends when another request does. On an idle one nothing changes from one round
to the next: the scheduler turns, ``/health`` answers, and nobody is served.

The fix acts only if a request was refused and nothing else runs. It cuts the node where the window
begins, so that the lock covers the window only. Then it asks once more, with the least that the
allocator needs, and with a shorter chunk if the whole one does not fit. A server on which something
runs, or on which nobody is refused, does what it always did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, around
from g4debug.fixes.source import source

ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_asked_again: list[Any] = []  # the adder that asks once more, while it does


def around_add(
    call_next: Callable[..., Any],
    adder: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """Wraps ``PrefillAdder.add_one_req``. Returns what SGLang makes of the request."""
    result = call_next(adder, req, has_chunked_req, truncation_align_size)
    if result.name != "NO_TOKEN" or has_chunked_req or not _alone(adder):
        return result
    if not adder.tree_cache.is_chunk_cache():
        lock_the_window_only(adder.tree_cache, req.last_node)
    limit = adder.rem_chunk_tokens
    if limit is not None:
        adder.rem_chunk_tokens = min(limit, longest_chunk(adder, req.last_node))
    _asked_again.append(adder)
    try:
        if limit is None or adder.rem_chunk_tokens > 0:
            call_next(adder, req, has_chunked_req, truncation_align_size)
    finally:
        _asked_again.pop()
    return result  # it is refused still, or nobody else is to join it in this round


def around_budget(
    call_next: Callable[..., int], adder: Any, extend_input_len: int, *args: Any, **kwargs: Any
) -> int:
    """Wraps ``PrefillAdder._swa_budget_for_req``: how many SWA tokens a request is said to need."""
    budget = call_next(adder, extend_input_len, *args, **kwargs)
    if adder not in _asked_again:
        return budget
    chunk = adder.rem_chunk_tokens
    allocated = extend_input_len if chunk is None else min(extend_input_len, chunk)
    return min(budget, int(adder.ceil_paged_tokens(allocated) + adder.page_size))


def longest_chunk(adder: Any, node: Any) -> int:
    """The most tokens, in whole pages, for which there are SWA pages while ``node`` is locked."""
    if adder.tree_cache.is_chunk_cache():
        room = adder.rem_swa_tokens
    else:
        with adder._lock_node(node):
            room = adder.rem_swa_tokens
    # SGLang asks for one page more than the chunk, and for something to be left.
    return int((room - adder.page_size - 1) // adder.page_size * adder.page_size)


def lock_the_window_only(tree: Any, node: Any) -> None:
    """Cut the node in which the sliding window that ends with ``node`` begins.

    A later lock of ``node`` then ends there. Locks that are held stay as they are.
    """
    left = -(-tree.sliding_window_size // tree.page_size) * tree.page_size
    while node is not tree.root_node and left > 0:
        length = len(node.value)
        if length > left:
            tree._split_node(node.key, node, length - left)
        left -= length
        node = node.parent


def _alone(adder: Any) -> bool:
    """True if no request runs that could give pages back, on a server that this fix knows."""
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
    from sglang.srt.server_args import get_global_server_args

    args, tree = get_global_server_args(), adder.tree_cache
    if args.disaggregation_mode != "null" or args.pp_size > 1:
        return False  # others may hold pages that this adder does not know of
    if adder.prefill_delayer_single_pass is not None or adder.dllm_config is not None:
        return False  # the ranks agree once in a round; blocks are of one length
    if not adder.is_hybrid_swa or not (tree.is_chunk_cache() or isinstance(tree, SWARadixCache)):
        return False
    runs = adder.running_batch is not None and adder.running_batch.reqs
    return not adder.can_run_list and not runs


def still_broken() -> bool:
    """True if the need is at least one window, and a chunk is not made shorter."""
    budget = source(f"{ADDER}._swa_budget_for_req")
    return "max(alloc, self.tree_cache.sliding_window_size)" in budget


FIX = Fix(
    id="idle-admission",
    title="an idle server admits a request whose cached prefix has the SWA pages that it lacks",
    seed="none; from a report upstream",
    upstream="#32379 (in 0.5.18)",
    needs=">=0.5.12,<0.5.18",
    elsewhere={
        ">=0.5.18": "its prefix cache locks the window only, and a chunk that never fits is made "
        "shorter"
    },
    still_broken=still_broken,
    hooks=(around("adder.add", around_add), around("adder.swa_budget", around_budget)),
    purpose="correctness",
)
