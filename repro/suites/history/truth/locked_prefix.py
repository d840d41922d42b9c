"""Counts the locked pages of a cached prefix that an insert gives back.

The situation: a request's tokens are inserted over a node of the prefix cache that has lost its
SWA half (a tombstone) and that running requests have locked. The newcomer still has a SWA half for
these tokens. The upstream fix (#29352; 0.5.15, ``SWARadixCache._insert_helper``) asks
``full_lock_ref`` there and keeps the node's full pages. Without it, they are freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around, swa_allocator


def install(counter: Counter) -> None:
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

    allocator_class = swa_allocator()
    locked: set[int] = set()  # positions in the full pool, while such an insert runs

    @around(SWARadixCache, "insert")
    def insert(tree: Any, params: Any, *_: Any, **__: Any) -> Callable[[Any], None] | None:
        found = locked_tombstones(tree, params)
        if not found:
            return None
        locked.update(found)
        counter.reached()
        return lambda _result: locked.clear()

    @around(allocator_class, "free")
    def free(_allocator: Any, positions: Any) -> None:
        if locked:
            hurt = sorted(locked.intersection(positions.tolist()))
            if hurt:
                counter.triggered(f"{len(hurt)} locked full positions from {hurt[0]} on are freed")


def locked_tombstones(tree: Any, params: Any) -> list[int]:
    """The full positions of the locked nodes that the insert would give a new SWA half."""
    if tree.disable or params.value is None:
        return []
    key, _ = params.key.maybe_to_bigram_view(tree.is_eagle, params.value)
    key = key.page_aligned(tree.page_size)
    owned = max(params.prev_prefix_len, params.swa_evicted_seqlen)
    node, end, found = tree.root_node, 0, []
    while len(key) and (child := node.children.get(key.child_key(tree.page_size))) is not None:
        node = child
        length = node.key.match(key, page_size=tree.page_size)
        begin, end = end, end + length
        if node.swa_tombstone and node.full_lock_ref > 0 and owned < end:
            found += node.value[max(0, params.swa_evicted_seqlen - begin) : length].tolist()
        if length < len(node.key):
            break
        key = key[length:]
    return found
