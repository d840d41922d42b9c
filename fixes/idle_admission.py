"""Admits a request that an idle server refuses for ever for want of SWA pages (sglang #32379).

Before a request is admitted, SGLang holds what its next chunk needs against the SWA pages that are
free or can be evicted. While it looks, it has the request's cached prefix locked, which takes pages
away from those. Three things make an answer of no that never changes, although the pool has room:

* Up to 0.5.17 the lock covers whole nodes of the prefix cache, back to the one in which the sliding
  window begins. A node of one long prompt is then locked whole, far behind the window. And a
  request needs a window and a page at least, however short the rest of its prompt is.
* Up to 0.5.17 the chunk is never made shorter.
* From 0.5.18 on it is, but only for a need that is more than the whole pool. A need that is less
  than the pool, and more than the pool without the request's own prefix, is refused as before.

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
from g4debug.fixes.paths.base import arguments
from g4debug.fixes.source import source
from g4debug.hooking import targets

CACHES = ("SWARadixCache", "UnifiedRadixCache", "SWAChunkCache")
_asking_again: list[Any] = []  # the PrefillAdder, while it is asked once more


def around_add(
    call_next: Callable[..., Any],
    adder: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """Wraps ``PrefillAdder.add_one_req``, which admits a request, or says why it does not."""
    result = call_next(adder, req, has_chunked_req, truncation_align_size)
    if result.name != "NO_TOKEN" or has_chunked_req or not _stands(adder):
        return result
    if locks_whole_nodes(adder.tree_cache):
        lock_the_window_only(adder.tree_cache, req.last_node)
    if adder.rem_chunk_tokens is not None:
        longest = longest_chunk(adder, req.last_node)
        if longest <= 0:
            return result
        adder.rem_chunk_tokens = min(adder.rem_chunk_tokens, longest)
    _asking_again.append(adder)
    try:
        call_next(adder, req, has_chunked_req, truncation_align_size)
    finally:
        _asking_again.pop()
    return result  # it is refused still, or nobody else is to join it in this round


def around_need(
    call_next: Callable[..., int], owner: Any, extend_input_len: int, *args: Any, **kwargs: Any
) -> int:
    """Wraps the function that says how many SWA tokens a request needs for its next chunk."""
    need = call_next(owner, extend_input_len, *args, **kwargs)
    if not _asking_again:
        return need
    chunk = _asking_again[-1].rem_chunk_tokens
    allocated = extend_input_len if chunk is None else min(extend_input_len, chunk)
    return min(need, int(owner.ceil_paged_tokens(allocated) + owner.page_size))


def longest_chunk(adder: Any, node: Any) -> int:
    """The most tokens, in whole pages, for which there are SWA pages while ``node`` is locked."""
    with adder._lock_node(node):
        budget = getattr(adder, "memory_budget", None)  # from 0.5.21 on
        room = adder.rem_swa_tokens if budget is None else budget.remaining_swa
    # SGLang asks for one page more than the chunk, and for something to be left.
    return int((room - adder.page_size - 1) // adder.page_size * adder.page_size)


def locks_whole_nodes(tree: Any) -> bool:
    """True for the prefix cache of hybrid models up to 0.5.17."""
    return type(tree).__name__ == "SWARadixCache"


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


def _stands(adder: Any) -> bool:
    """True if no request runs that could give pages back, on a server that this fix knows."""
    runs = adder.running_batch is not None and adder.running_batch.reqs
    if adder.can_run_list or runs or not adder.is_hybrid_swa or adder.dllm_config is not None:
        return False
    if adder.prefill_delayer_single_pass is not None:
        return False  # the ranks agree once in a round
    if type(adder.tree_cache).__name__ not in CACHES:
        return False
    budget = getattr(adder, "memory_budget", None)
    if budget is not None and (type(budget).__name__ != "SWAPrefillBudget" or budget.req_ring):
        return False
    args = arguments()
    # With these, others may hold pages that this adder does not know of.
    return bool(
        args.disaggregation_mode == "null"
        and args.pp_size == 1
        and not args.enable_hierarchical_cache
    )


def still_broken() -> bool:
    """True if a need that is less than the whole pool is refused, and no shorter chunk is tried."""
    owner = str(targets.path("adder.swa_need")).rpartition(".")[0]
    text = source(owner)
    return "max(alloc, self.tree_cache.sliding_window_size)" in text or "never_fits(" in text


FIX = Fix(
    id="idle-admission",
    title="an idle server admits a request whose own cached prefix has the SWA pages that it lacks",
    seed="none; from a report upstream",
    upstream="#32379 (in 0.5.18), in part",
    needs=">=0.5.12",
    still_broken=still_broken,
    hooks=(around("adder.add", around_add), around("adder.swa_need", around_need)),
    purpose="correctness",
)
