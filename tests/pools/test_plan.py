"""The tokens that requests keep in each pool, against SGLang's own caches; and the plan."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import releases
from published import A4B_26B, DENSE_31B

from g4debug.hooking import targets
from g4debug.pools import config
from g4debug.pools.plan import (
    Need,
    Workload,
    locked_tokens,
    need_of,
    page_ceil,
    plan,
    row,
    swa_holds,
)
from g4debug.pools.solve import Memory

MOE, DENSE = config.parse(A4B_26B, "26B"), config.parse(DENSE_31B, "31B")
SEED_26B, SEED_31B = Memory(109_478_050_000), Memory(98_053_000_000)


swa_radix_cache = pytest.mark.skipif(
    not targets.matches("<0.5.18"),
    reason="0.5.18 and later keep prompts in another cache, the unified one, of which the plan "
    "does not know what is locked; docs/commands.md says so",
)


class Tree:
    """A real SWARadixCache on a real SWA allocator; prompts are prefilled chunk by chunk."""

    def __init__(self, window: int, page: int, tokens: int) -> None:
        import torch
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

        self.page, self.torch = page, torch
        pool = releases.swa_pool(tokens, tokens, page, 4, [0], [1])
        self.allocator = releases.allocator_class("swa.init")(
            tokens, tokens, page, torch.float32, "cpu", pool, False
        )
        self.requests = ReqToTokenPool(32, tokens, "cpu", False)
        self.cache = SWARadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                sliding_window_size=window,
            )
        )
        self.name = 0

    def prefill(self, prompt: int, cuts: list[int]) -> None:
        """One request; ``cuts`` are the ends of its chunks."""
        torch = self.torch
        self.name += 1
        ids = [self.name * 100_000 + i for i in range(prompt)]
        req = SimpleNamespace(
            req_pool_idx=None, fill_ids=[], extra_key=None, last_node=self.cache.root_node,
            cache_protected_len=0, swa_uuid_for_lock=None, swa_prefix_lock_released=False,
        )  # fmt: skip
        req.get_fill_ids = lambda: req.fill_ids  # 0.5.14 and later ask this way
        (req.req_pool_idx,) = self.requests.alloc([req])
        begin = 0
        for end in cuts:
            one = torch.tensor
            table = self.requests.req_to_token[req.req_pool_idx]
            last = one([int(table[begin - 1]) if begin else -1])
            slots = self.allocator.alloc_extend(
                one([begin]), one([begin]), one([end]), one([end]), last, end - begin
            )
            assert slots is not None
            table[begin:end] = slots.to(torch.int32)
            req.fill_ids = ids[:end]
            self.cache.cache_unfinished_req(req)
            begin = end


def chunks(prompt: int, chunk: int, page: int, queue: int) -> list[list[int]]:
    """Where a queue of prompts is cut, each prompt counted in whole pages."""
    stride = page_ceil(prompt, page)
    out = []
    for n in range(queue):
        inner = [c - n * stride for c in range(0, (n + 1) * stride, chunk) if c > n * stride]
        out.append([*inner, prompt])
    return out


@swa_radix_cache
@pytest.mark.parametrize(
    ("prompt", "chunk", "window", "page"),
    [
        (256, 64, 31, 16),
        (256, 512, 31, 16),  # whole prompts in a chunk: all of it is locked
        (160, 96, 63, 16),
        (96, 64, 127, 16),  # shorter than the window
        (512, 192, 100, 32),
    ],
)
def test_what_a_running_request_locks_is_what_the_real_tree_locks(
    sglang, prompt, chunk, window, page
):
    import math

    queue = chunk // math.gcd(chunk, prompt)
    tree = Tree(window, page, page_ceil(prompt, page) * queue + 4 * page)
    for cuts in chunks(prompt, chunk, page, queue):
        tree.prefill(prompt, cuts)
    mean = tree.cache.swa_protected_size() / queue
    assert locked_tokens(prompt, chunk, window, page) == page_ceil(math.ceil(mean), page)


@swa_radix_cache
def test_a_split_leaf_locks_one_window(sglang, monkeypatch):
    from sglang.srt.environ import envs

    tree = Tree(31, 16, 512)
    tree.prefill(256, [256])
    assert tree.cache.swa_protected_size() == 256
    with envs.SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT.override(True):
        split = Tree(31, 16, 512)
        split.prefill(256, [256])
        assert split.cache.swa_protected_size() == 32
    geometry = dataclasses.replace(MOE, window=32)
    memory = Memory(1 << 30, page=16)
    for on, locked in ((False, 256), (True, 32)):
        load = Workload(256, 16, 1, chunk=256, split_leaf=on)
        assert need_of(geometry, memory, load).swa_locked == locked


def test_without_the_tree_a_request_keeps_its_window_and_what_it_adds_between_evictions():
    short = need_of(MOE, SEED_26B, Workload(100, 50, 1, radix=False))
    assert (short.full, short.swa, short.swa_locked) == (192, 192, 0)
    long = need_of(MOE, SEED_26B, Workload(8000, 4000, 1, radix=False))
    assert long.full == 12_032
    assert long.swa == page_ceil(1023 + 2 * 64 + 960, 64)
    mtp = need_of(MOE, SEED_26B, Workload(8000, 8000, 1, draft=4, radix=False))
    assert mtp.swa == page_ceil(1023 + 2 * 64 + 4 * 960, 64)


def test_the_last_request_must_pass_admission():
    need = Need(full=100, swa=64, swa_locked=0, admit=200)
    assert [swa_holds(n, need) for n in (0, 200, 201, 264, 265, 329)] == [0, 0, 1, 1, 2, 3]


def test_admission_is_sglangs():
    """Admitted only if more than that is free: ``swa_needed >= rem_swa_tokens`` refuses."""
    assert need_of(MOE, SEED_26B, Workload(8000, 1, 1, chunk=2048)).admit == 2048 + 64
    assert need_of(MOE, SEED_26B, Workload(100, 1, 1, chunk=2048)).admit == 1023 + 64
    assert need_of(MOE, SEED_26B, Workload(8000, 1, 1, chunk=0)).admit == 8000 + 64


def test_the_seeds_saturation():
    """PR #7, 31B, 80 x (1k, 1k) with MTP: the SWA pool saturates at 80 with both ratios, and at
    32 with neither; it is the smaller pool of the two."""
    load = Workload(1000, 1000, 80, chunk=16_384, draft=4)
    need = need_of(DENSE, SEED_31B, load)
    small, large = row(DENSE, SEED_31B, need, 0.15), row(DENSE, SEED_31B, need, 0.8)
    assert small.pools.swa == 71_808
    assert large.pools.swa == 106_368
    assert small.binds(80) == "swa"
    assert large.swa_holds < 80
    assert small.holds < large.holds
    assert large.holds >= 32


def test_the_best_ratio_is_the_best_of_all_hundredths():
    for load in (
        Workload(8000, 1000, 80, chunk=16_384, draft=4),
        Workload(8000, 1000, 80, radix=False),
        Workload(200, 200, 80),
    ):
        found = plan(MOE, SEED_26B, load)
        all_rows = [row(MOE, SEED_26B, found.need, n / 100) for n in range(1, 101)]
        assert found.best.holds == max(r.holds for r in all_rows)
        assert found.best in found.rows
        assert found.served in found.rows


def test_what_sglang_serves_with_depends_on_the_experts():
    load = Workload(1000, 1000, 8)
    assert plan(MOE, SEED_26B, load).served.ratio == 0.15
    assert plan(DENSE, SEED_31B, load).served.ratio == 0.8


def test_large_chunks_make_0_15_the_worse_ratio_and_a_split_leaf_helps():
    """What repro/swa_ratio.py shows on a real engine, on the seed's own model and load."""
    load = Workload(8000, 1000, 80, chunk=16_384, draft=4)
    found = plan(MOE, SEED_26B, load)
    old = row(MOE, SEED_26B, found.need, 0.8)
    assert found.served.holds < old.holds
    assert "the SWA pool holds only" in found.reason
    (hint,) = found.hints
    assert "SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT=1" in hint
    split = plan(MOE, SEED_26B, dataclasses.replace(load, split_leaf=True))
    assert f"{split.best.holds} requests fit with the ratio {split.best.ratio:g}" in hint
    assert not split.hints
    assert split.served.holds > row(MOE, SEED_26B, split.need, 0.8).holds


def test_words_for_each_case():
    enough = plan(MOE, SEED_26B, Workload(1000, 1000, 8))
    assert "which SGLang takes by itself, holds your 8, too" in enough.reason
    waits = plan(DENSE, SEED_31B, Workload(1000, 1000, 80))
    assert "No ratio holds your 80" in waits.reason
    nothing = plan(MOE, Memory(1 << 20), Workload(1000, 1000, 8))
    assert nothing.best.holds == 0
    assert "no ratio holds even one request" in nothing.reason
    assert not nothing.hints
