"""Lets a lock on a cached prefix hold the SWA pages of the sliding window only.

From the leaf up, ``SWARadixCache.inc_lock_ref`` locks whole nodes until they cover the window. A
node of one long prompt is so locked whole, far behind the window. From 0.5.18 on SGLang has another
prefix cache, which cuts a new leaf there.
"""

from __future__ import annotations

from typing import Any


def has_it(tree: Any) -> bool:
    """True for the prefix cache whose locks hold whole nodes."""
    return type(tree).__name__ == "SWARadixCache"


def cut(tree: Any, node: Any) -> bool:
    """Cut the node in which the window that ends with ``node`` begins. False if none reaches over.

    The next lock of ``node`` ends there. Locks that are held stay as they are.
    """
    left = -(-int(tree.sliding_window_size) // int(tree.page_size)) * int(tree.page_size)
    while node is not tree.root_node and left > 0:
        if len(node.value) > left:
            if node.swa_tombstone:
                return False
            tree._split_node(node.key, node, len(node.value) - left)
            return True
        left -= len(node.value)
        node = node.parent
    return False


def relock(tree: Any, request: Any) -> bool:
    """Let a request that is under way lock the window only. False if it locks no more than that."""
    if request.swa_prefix_lock_released or not cut(tree, request.last_node):
        return False
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams

    lock = DecLockRefParams(swa_uuid_for_lock=request.swa_uuid_for_lock)
    tree.dec_lock_ref(request.last_node, lock)
    request.swa_uuid_for_lock = tree.inc_lock_ref(request.last_node).swa_uuid_for_lock
    return True
