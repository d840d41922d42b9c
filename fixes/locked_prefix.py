"""A prefix that a running request has locked keeps its pages (upstream sglang #29352).

The prefix cache of hybrid models drops the SWA half of a node that lies behind every running
request's window (a "tombstone"), while requests that share the prefix still read its full
half. If another request then computes the same prefix anew, ``SWARadixCache._insert_helper``
takes the newcomer's pages into the node and *frees the old full pages*, locked or not. The
running request goes on reading them: they are handed to somebody else, its answer is wrong,
and nothing crashes. Found by this project's page-table tracer in its own soak.

The fix, before SGLang's insert: a locked tombstone keeps its full pages and takes over only
the newcomer's SWA pages. SGLang then sees a node that is no tombstone, and frees the
newcomer's full pages as it does for any other overlap.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix
from g4debug.fixes.source import source

if TYPE_CHECKING:
    import torch

    from g4debug.hooking.hooks import Hooks

ID = "locked-prefix"
SITE = "tree.swa_insert"


def before_insert(
    tree: Any,
    node: Any,
    key: Any,
    value: torch.Tensor,
    update_kv_after_len: int,
    swa_evicted_seqlen: int = 0,
) -> None:
    """Before ``SWARadixCache._insert_helper``: give SWA pages back to locked tombstones.

    key: the tokens to insert below ``node``. value: int64 [len(key)], their full-pool indices.
    update_kv_after_len: tokens that the tree owns already. swa_evicted_seqlen: tokens whose SWA
    pages the newcomer has given up itself.
    """
    begin = 0
    while len(key) > 0 and (child := node.children.get(key.child_key(tree.page_size))) is not None:
        node = child
        length = node.key.match(key, page_size=tree.page_size)
        end = begin + length
        if length == 0:
            return
        if (
            node.swa_tombstone
            and node.full_lock_ref > 0
            and max(update_kv_after_len, swa_evicted_seqlen) < end
        ):
            if length < len(node.key):
                node = tree._split_node(node.key, node, length)
            skip = max(0, swa_evicted_seqlen - begin)
            if skip:
                tree._split_node(node.key, node, skip)  # leaves the rest in `node`
            adopt_swa(tree, node, value[skip:length])
        elif length < len(node.key):
            return
        begin, key, value = end, key[length:], value[length:]


def adopt_swa(tree: Any, node: Any, newcomer: torch.Tensor) -> None:
    """Move the SWA slots of ``newcomer`` (full-pool indices) to the node's own full slots."""
    allocator = tree.token_to_kv_pool_allocator
    slots = allocator.full_to_swa_index_mapping[newcomer].clone()
    allocator.set_full_to_swa_mapping(node.value, slots)
    allocator.set_full_to_swa_mapping(newcomer, slots.new_zeros(len(slots)))
    node.swa_tombstone = False
    tree.swa_lru_list.insert_mru(node)
    tree.swa_evictable_size_ += len(node.value)


def still_broken() -> bool:
    """True if the insert frees a tombstone's full pages without asking who has locked them."""
    text = source("sglang.srt.mem_cache.swa_radix_cache.SWARadixCache._insert_helper")
    frees = re.search(r"free\(\s*node\.value", text) is not None
    return frees and re.search(r"if\s+(not\s+)?node\.full_lock_ref", text) is None


def apply(hooks: Hooks) -> None:
    from g4debug.hooking.hooks import Order

    hooks.before(SITE, Order.FIX, ID, before_insert)


FIX = Fix(
    id=ID,
    title="a cached prefix that a running request reads keeps its pages",
    seed="none: found by the page-table tracer",
    upstream="sglang #29352 (2026-06-30)",
    needs=">=0.5.12,<0.5.15",
    still_broken=still_broken,
    apply=apply,
)
