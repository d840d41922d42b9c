"""locked-prefix on SGLang's real prefix cache and allocators."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from real_backend import PAGE, WINDOW, Rig

pytestmark = [
    pytest.mark.written_for("locked-prefix"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
HEAD, TAIL = 6 * PAGE, 4 * PAGE  # tokens; the tail alone fills the window
assert TAIL > WINDOW


class Tree:
    """A real SWARadixCache in which a running request has locked HEAD + TAIL tokens.

    The SWA half of HEAD, which lies behind its window, was evicted.
    """

    def __init__(self) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

        self.rig = Rig()
        self.allocator = self.rig.allocator
        self.cache = SWARadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rig.req_to_token,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                sliding_window_size=WINDOW,
            )
        )
        self.old = self.slots(HEAD + TAIL)
        self.insert(HEAD, self.old[:HEAD])
        self.insert(HEAD + TAIL, self.old, protected=HEAD)
        self.locked = self.match(HEAD + TAIL).last_device_node
        self.lock = self.cache.inc_lock_ref(self.locked)
        self.cache.evict(EvictParams(num_tokens=0, swa_num_tokens=HEAD))
        assert self.head.swa_tombstone
        assert self.head.full_lock_ref > 0

    @property
    def head(self):
        (node,) = self.cache.root_node.children.values()
        return node

    def slots(self, tokens: int) -> torch.Tensor:
        zero, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
        found = self.allocator.alloc_extend(zero, zero, length, length, torch.tensor([-1]), tokens)
        assert found is not None
        return found

    def key(self, tokens: int):
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(list(range(tokens)), None)

    def insert(self, tokens: int, value: torch.Tensor, protected: int = 0, evicted: int = 0):
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        self.cache.insert(
            InsertParams(
                key=self.key(tokens),
                value=value,
                prev_prefix_len=protected,
                swa_evicted_seqlen=evicted,
            )
        )

    def match(self, tokens: int):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def finish(self) -> None:
        """The running request ends."""
        from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams

        uuid = self.lock.swa_uuid_for_lock
        self.cache.dec_lock_ref(self.locked, DecLockRefParams(swa_uuid_for_lock=uuid))

    def free(self, slots: torch.Tensor) -> bool:
        pages = self.allocator.full_attn_allocator.free_pages
        return bool(torch.isin(slots // PAGE, pages).any())

    def swa(self, slots: torch.Tensor) -> list[int]:
        return self.allocator.full_to_swa_index_mapping[slots].tolist()


def test_sglang_frees_pages_that_a_running_request_reads(arm):
    """The bug itself; if this fails, SGLang has mended it and the fix is not needed."""
    arm(G4DEBUG_FIX_LOCKED_PREFIX="0")
    tree = Tree()
    tree.insert(HEAD, tree.slots(HEAD))
    assert tree.free(tree.old[:HEAD])


@pytest.fixture
def tree(arm):
    arm(G4DEBUG_TRACE="page-table")  # the ledger looks on
    return Tree()


def sound(tree: Tree, running: bool = True) -> None:
    """SGLang's own sanity check (of an idle tree), and every SWA page in one place only."""
    from g4debug import plugin

    if running:
        tree.finish()
    tree.cache.sanity_check()
    ledger = plugin.in_force.ledger
    assert not ledger.broken
    mapped = tree.allocator.full_to_swa_index_mapping[:-1].view(-1, PAGE)[:, 0] // PAGE
    swa = [int(p) for p in mapped if p > 0]
    assert len(set(swa)) == len(swa)
    assert set(swa) == set(ledger.pools["swa"].held.nonzero()[0].tolist())
    assert ledger.pools["full"].partner.tolist() == [0, *mapped.tolist()[1:]]


def test_the_pages_stay_and_the_swa_half_comes_back(tree):
    new = tree.slots(HEAD)
    expected = tree.swa(new)
    tree.insert(HEAD, new)
    assert not tree.free(tree.old)
    assert tree.free(new)
    assert tree.head.value.tolist() == tree.old[:HEAD].tolist()
    assert not tree.head.swa_tombstone
    assert tree.swa(tree.old[:HEAD]) == expected
    assert tree.match(HEAD).device_indices.tolist() == tree.old[:HEAD].tolist()
    sound(tree)


@pytest.mark.parametrize("tokens", [2 * PAGE, HEAD - PAGE])
def test_a_part_of_the_node(tree, tokens):
    new = tree.slots(tokens)
    tree.insert(tokens, new)
    assert not tree.free(tree.old)
    assert tree.free(new)
    assert tree.match(tokens).device_indices.tolist() == tree.old[:tokens].tolist()
    assert tree.match(HEAD + TAIL).last_device_node is tree.locked
    sound(tree)


def test_a_newcomer_that_has_evicted_a_part_itself(tree):
    new = tree.slots(HEAD)
    tree.allocator.free_swa(new[: 2 * PAGE])
    expected = tree.swa(new[2 * PAGE :])
    tree.insert(HEAD, new, evicted=2 * PAGE)
    assert not tree.free(tree.old)
    assert tree.free(new)
    assert tree.swa(tree.old[:HEAD]) == [0] * (2 * PAGE) + expected
    sound(tree)


def test_everything_else_goes_sglangs_own_way(tree):
    new = tree.slots(HEAD)
    tree.allocator.free_swa(new)
    tree.insert(HEAD, new, evicted=HEAD)  # it has no SWA half to give
    assert tree.head.swa_tombstone
    assert tree.free(new)
    tree.finish()
    other = tree.slots(HEAD)
    tree.insert(HEAD, other)  # nobody has locked it: SGLang may take the new pages
    assert tree.head.value.tolist() == other.tolist()
    assert tree.free(tree.old[:HEAD])
    assert not tree.free(tree.old[HEAD:])
    sound(tree, running=False)


def test_after_the_lock_is_gone_all_can_be_evicted(tree):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tree.insert(HEAD, tree.slots(HEAD))
    tree.finish()
    before = tree.allocator.full_available_size()
    tree.cache.evict(EvictParams(num_tokens=HEAD + TAIL, swa_num_tokens=0))
    assert tree.allocator.full_available_size() == before + HEAD + TAIL
    assert not tree.cache.root_node.children
    sound(tree, running=False)
