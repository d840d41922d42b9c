"""Admits a request that an idle server refuses for ever for want of SWA pages (sglang #32379).

Before a request is admitted, SGLang holds what its next chunk needs against the SWA pages that are
free or can be evicted. While it looks, it has the request's cached prefix locked, which takes pages
away from those. So the answer may be no, and stay no, although the pool has room:

* Up to 0.5.17 the lock holds whole nodes of the prefix cache (see ``_window_lock``), a request is
  said to need a window and a page however short it is, and a chunk is never made shorter.
* From 0.5.18 on a chunk is made shorter, but only for a need that is more than the whole pool. A
  need that is less than that, and more than the pool without the request's own prefix, is refused.

On a busy server that ends when another request does. On an idle one nothing changes from one round
to the next: the scheduler turns, ``/health`` answers, and nobody is served.

The fix acts where a request is refused in two rounds in a row, and nothing else runs in either. By
the second one no forward is in flight, so nobody can give anything back. It cuts the node where the
window begins, and asks once more, with the least that the allocator needs, and with a shorter chunk
if the whole one does not fit. If that does not help either, it evicts the prefix cache, and the
next round finds the request without a prefix. All others are served as they always were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes import _window_lock
from g4debug.fixes._twice_refused import Ask, TwiceRefused
from g4debug.fixes.base import Fix, around
from g4debug.fixes.paths.base import arguments
from g4debug.fixes.source import source
from g4debug.hooking import targets

CACHES = ("SWARadixCache", "UnifiedRadixCache", "SWAChunkCache")
_asking_again: list[Any] = []  # the PrefillAdder, while it is asked once more


def _ask_again(adder: Any, req: Any, ask: Ask) -> None:
    tree = adder.tree_cache
    if _window_lock.has_it(tree):
        _window_lock.cut(tree, req.last_node)
    longest = longest_chunk(adder, req.last_node)
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens = min(adder.rem_chunk_tokens, longest)
    if longest > 0:
        _asking_again.append(adder)
        try:
            ask()
        finally:
            _asking_again.pop()
    if not adder.can_run_list:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        allocator = adder.token_to_kv_pool_allocator
        tree.evict(EvictParams(num_tokens=allocator.size_full, swa_num_tokens=allocator.size_swa))


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


def _serves(adder: Any, req: Any) -> bool:
    """True on a server with pools and a prefix cache that this fix knows."""
    tree = adder.tree_cache
    if not adder.is_hybrid_swa or type(tree).__name__ not in CACHES:
        return False
    budget = getattr(adder, "memory_budget", None)
    if budget is not None and (type(budget).__name__ != "SWAPrefillBudget" or budget.req_ring):
        return False
    # A cache in the host, or elsewhere, may hold pages that this adder does not know of.
    linked = getattr(tree, "linker", None) is not None
    return bool(not linked and not arguments().enable_hierarchical_cache)


around_add = TwiceRefused(_serves, _ask_again)


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
