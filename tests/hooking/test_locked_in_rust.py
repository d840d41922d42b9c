"""Which nodes a request has locked, as the tree in Rust tells it, beside the tree in Python."""

from __future__ import annotations

import pytest
import releases

from g4debug.hooking import prefix_tree, targets

pytestmark = pytest.mark.skipif(targets.matches("<0.5.22"), reason="it has no such trees")
FULL, SWA, WINDOW, PAGE = 2048, 1024, 100, 16  # tokens


def told(monkeypatch, core: str) -> dict[str, list[prefix_tree.Locked]]:
    """By pool: what a request has locked whose prompt others share in part."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey

    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    releases.configure(page_size=PAGE, disaggregation_mode="null")
    pool = releases.swa_pool(FULL, SWA, PAGE, 8, [0], [1])
    new = releases.allocator_class("swa.init")
    import torch

    allocator = new(FULL, SWA, PAGE, torch.float32, "cpu", pool, False)
    rows = ReqToTokenPool(4, FULL, "cpu", False)
    tree = releases.prefix_cache(rows, allocator, PAGE, WINDOW, disable=False)
    keys = [[*range(1, 193), *range(first, first + 128)] for first in (1000, 2000)]
    for tokens in keys:
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([len(tokens)])
        slots = allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), len(tokens))
        tree.insert(InsertParams(key=RadixKey(releases.token_ids(tokens), None), value=slots))
    key = RadixKey(releases.token_ids(keys[0]), None)
    last = tree.match_prefix(MatchPrefixParams(key)).last_device_node
    tree.lock(last)
    assert prefix_tree.is_native(tree) == (core == "rust")
    assert tree.full_protected_size() == 320
    return {pool: prefix_tree.locked_above(tree, last, pool) for pool in ("full", "swa")}


def test_they_are_the_same_nodes(sglang, monkeypatch):
    python, rust = (told(monkeypatch, core) for core in ("python", "rust"))
    for pool, nodes in python.items():
        assert nodes
        assert [one.tokens for one in rust[pool]] == [one.tokens for one in nodes]
        assert {one.locks for one in nodes} == {1}
        assert {one.locks for one in rust[pool]} == {None}
