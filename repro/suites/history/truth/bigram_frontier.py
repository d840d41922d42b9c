"""Counts the pages that are in the prefix cache and in the list of free pages at once.

The situation: speculative decoding, and a prompt that fills its last page is put into the prefix
cache, behind the window of which SWA pages are given back first. The upstream fix (#34870; 0.5.18,
``UnifiedRadixCache.cache_unfinished_req``) measures the key and not the prompt there. Without it
the cache cannot find its newest insert, takes it for a duplicate at the next one, and frees pages
that it owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suites.history.counter import Counter, around, swa_allocator


def install(counter: Counter) -> None:
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    allocator_class = swa_allocator()
    trees: list[Any] = []  # the one tree, once it was seen
    lost: set[int] = set()

    def look(allocator: Any) -> None:
        if not trees:
            return
        full = allocator.full_attn_allocator
        free = {*full.free_pages.tolist(), *full.release_pages.tolist()}
        both = free & owned(trees[0])
        if both - lost:
            counter.triggered(f"{len(both - lost)} cached pages are in the free list")
        lost.clear()
        lost.update(both)

    @around(UnifiedRadixCache, "cache_unfinished_req")
    def cache_unfinished_req(tree: Any, req: Any, *_: Any, **__: Any) -> Callable[[Any], None]:
        if not trees:
            trees.append(tree)
        switch = envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS.get()
        eagle = getattr(tree, "tree_core", tree).is_eagle
        length = len(req.get_fill_ids())
        # Shorter ones lie in the window as a whole.
        if switch and eagle and length % tree.page_size == 0 and length >= 4 * tree.page_size:
            counter.reached()
        return lambda _result: look(tree.token_to_kv_pool_allocator)

    @around(allocator_class, "free_group_end")
    def group_end(allocator: Any) -> Callable[[Any], None]:
        return lambda _result: look(allocator)


def owned(tree: Any) -> set[int]:
    """The full pages of all nodes of the prefix cache."""
    from sglang.srt.mem_cache.unified_radix_cache import BASE_COMPONENT_TYPE

    found: set[int] = set()
    nodes = list(getattr(tree, "tree_core", tree).root_node.children.values())
    while nodes:
        node = nodes.pop()
        value = node.component_data[BASE_COMPONENT_TYPE].value
        if value is not None:
            found.update((value[:: tree.page_size] // tree.page_size).tolist())
        nodes += node.children.values()
    return found
