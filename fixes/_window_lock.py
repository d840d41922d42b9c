"""Lets a lock on a cached prefix hold the SWA pages of the sliding window only.

From the leaf up, ``SWARadixCache.inc_lock_ref`` locks whole nodes until they cover the window. A
node of one long prompt is so locked whole, far behind the window. From 0.5.18 on SGLang has another
prefix cache, which cuts a new leaf there. Its locks hold whole nodes, too: where the last chunk is
shorter than the window, and so the leaf, the node above it is locked whole.
"""

from __future__ import annotations

from typing import Any

from g4debug.hooking import req_kv


def has_it(tree: Any) -> bool:
    """True for the prefix cache whose locks hold whole nodes."""
    return type(tree).__name__ == "SWARadixCache"


def takes_parts(tree: Any) -> bool:
    """True for the prefix cache that may have got only a part of a prompt, from 0.5.21 on."""
    return hasattr(tree, "checkpoint") or hasattr(tree, "unpin")


def hand_over(tree: Any, request: Any) -> bool:
    """Give a prefix cache that :func:`takes_parts` all that is computed of the request's prompt.

    False if that must not be. 0.5.21 frees what lies behind the window of the last token, and takes
    whole pages. If these end with less than a window of SWA pages, it does not find them again: it
    would neither lock them nor call them the request's. With Gemma's windows that cannot be.
    """
    end = req_kv.prefix(request)
    if hasattr(tree, "checkpoint"):
        tree.checkpoint(request, up_to=end)
        return True
    page, window = int(tree.page_size), int(tree.sliding_window_size)
    end -= bool(tree.tree_core.is_eagle)  # its keys are bigrams, one fewer than tokens
    kept = end // page * page - (end - 1 - max(window, page)) // page * page
    if kept < window:
        return False
    tree.cache_unfinished_req(request, chunked=True)  # up to the end of the last chunk
    return True


def _whole_pages(tokens: int, tree: Any) -> int:
    """So many tokens or more, as many as some pages have."""
    return -(-int(tokens) // int(tree.page_size)) * int(tree.page_size)


def cut(tree: Any, node: Any) -> bool:
    """Cut the node in which the window that ends with ``node`` begins. False if none reaches over.

    The next lock of ``node`` ends there. Locks that are held stay as they are.
    """
    left = _whole_pages(tree.sliding_window_size, tree)
    while node is not tree.root_node and left > 0:
        if len(node.value) > left:
            if node.swa_tombstone:
                return False
            tree._split_node(node.key, node, len(node.value) - left)
            return True
        left -= len(node.value)
        node = node.parent
    return False


def relock_unified(tree: Any, request: Any) -> bool:
    """As :func:`relock`, in the prefix cache of 0.5.21 and later, whether in Python or in Rust.

    It cuts a node where a prompt ends in it that is looked for; so the beginning of the window is
    looked for. What it has of the request's prompt lies behind ``cache_protected_len``.
    """
    lock = getattr(request, "lock", None)  # one object, where 0.5.21 has a receipt
    if lock is None and not hasattr(request, "lock_receipt"):
        return False
    if request.swa_prefix_lock_released if lock is None else lock.swa_released:
        return False
    has = request.kv.cache_protected_len // tree.page_size * tree.page_size
    window = getattr(tree, "swa_retain_window", tree.sliding_window_size)
    edge = has - _whole_pages(window, tree)
    if edge <= 0:
        return False
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    bigrams = bool(tree.tree_core.is_eagle)  # one fewer than tokens
    tokens = request.full_untruncated_fill_ids[: edge + bigrams]
    key = RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)
    tree.match_prefix(MatchPrefixParams(key=key))
    if lock is not None:
        tree.unlock(lock)
        request.lock = tree.lock(request.last_node)
    else:
        tree.dec_lock_ref(request.last_node, request.lock_receipt)
        request.lock_receipt = tree.inc_lock_ref(request.last_node).to_dec_params()
    return True


def relock(tree: Any, request: Any) -> bool:
    """Let a request that is under way lock the window only. False if it locks no more than that."""
    if request.swa_prefix_lock_released or not cut(tree, request.last_node):
        return False
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams

    lock = DecLockRefParams(swa_uuid_for_lock=request.swa_uuid_for_lock)
    tree.dec_lock_ref(request.last_node, lock)
    request.swa_uuid_for_lock = tree.inc_lock_ref(request.last_node).swa_uuid_for_lock
    return True
