"""Lets a prefix that a running request has locked keep its pages (upstream sglang #29352).

The prefix cache of hybrid models gives back the SWA pages of a node that lies behind the window of
every running request; such a node is a "tombstone". Requests that share the prefix still read its
full pages. If another request then computes the same prefix anew, ``SWARadixCache._insert_helper``
takes that request's pages into the node and *frees the old full pages*, whether they are locked or
not. The running request goes on reading them while they belong to somebody else: its answer is
wrong, and nothing crashes. Found by this project's page-table tracer in its own soak test.

The fix acts before SGLang's insert. A locked tombstone keeps its full pages and takes over only the
SWA pages of the new request. For SGLang the node is then no tombstone any more, and it frees the
new request's full pages as it does for any other overlap.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, before
from g4debug.fixes.source import source

if TYPE_CHECKING:
    import torch

SITE = "tree.swa_insert"


def before_insert(
    tree: Any,
    node: Any,
    key: Any,
    value: torch.Tensor,
    update_kv_after_len: int,
    swa_evicted_seqlen: int = 0,
) -> None:
    """Runs before ``SWARadixCache._insert_helper``: gives locked tombstones their SWA pages again.

    key: the tokens to insert below ``node``. value: int64 [len(key)], their positions in the full
    pool. update_kv_after_len: how many tokens the tree owns already. swa_evicted_seqlen: for how
    many tokens the new request has already given its SWA pages back.
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
                tree._split_node(node.key, node, skip)  # the rest stays in `node`
            adopt_swa(tree, node, value[skip:length])
        elif length < len(node.key):
            return
        begin, key, value = end, key[length:], value[length:]


def adopt_swa(tree: Any, node: Any, newcomer: torch.Tensor) -> None:
    """Give the node the SWA pages of the new request.

    newcomer: the new request's positions in the full pool. The node's own positions are then mapped
    to the SWA positions of these, which are mapped to nothing any more.
    """
    allocator = tree.token_to_kv_pool_allocator
    positions = allocator.full_to_swa_index_mapping[newcomer].clone()
    allocator.set_full_to_swa_mapping(node.value, positions)
    allocator.set_full_to_swa_mapping(newcomer, positions.new_zeros(len(positions)))
    node.swa_tombstone = False
    tree.swa_lru_list.insert_mru(node)
    tree.swa_evictable_size_ += len(node.value)


def still_broken() -> bool:
    """True if the insert frees a tombstone's full pages without asking whether they are locked."""
    text = source("sglang.srt.mem_cache.swa_radix_cache.SWARadixCache._insert_helper")
    frees = re.search(r"free\(\s*node\.value", text) is not None
    return frees and re.search(r"if\s+(not\s+)?node\.full_lock_ref", text) is None


FIX = Fix(
    id="locked-prefix",
    title="a cached prefix that a running request reads keeps its pages",
    seed="none; found by the page-table tracer",
    upstream="sglang #29352 (2026-06-30)",
    needs=">=0.5.12,<0.5.15",
    elsewhere={">=0.5.15": "SGLang itself keeps the pages that a running request has locked"},
    still_broken=still_broken,
    hooks=(before(SITE, before_insert),),
    purpose="correctness",
)
