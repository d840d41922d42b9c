"""FlashInfer's stand-ins against attention written one query, head and key at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from g4debug.cpu import fault
from g4debug.cpu import flashinfer_wrappers as fi

HEADS, KV_HEADS, DIM, SLOTS, WINDOW = 4, 2, 8, 40, 2
LISTS, QUERIES = ([3, 9, 14, 7], [], [20, 1, 30, 31, 32, 2]), (2, 1, 3)
PLAN = (HEADS, KV_HEADS, DIM, 1)
HOW = {"sm_scale": 0.3, "logits_soft_cap": 0.0}


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def begins(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


INDICES = torch.tensor([*itertools.chain(*LISTS), 0, 0], dtype=torch.int32)
INDPTR, QO = begins([len(x) for x in LISTS]), begins(QUERIES)
LAST = torch.ones(3, dtype=torch.int32)
KV = drawn(SLOTS, KV_HEADS, DIM), drawn(SLOTS + 1, KV_HEADS, DIM)[:SLOTS]
Q = drawn(sum(QUERIES), HEADS, DIM)


def by_hand(q, keys, values, queries, sees, cap=0.0):
    """keys: of each row, [heads, dim] each. sees(i, j, queries, keys): query i sees key j."""
    out, lse, at = [], [], 0
    width = values[0][0].shape[-1]
    for row, count in enumerate(queries):
        for i in range(count):
            heads = []
            for head in range(q.shape[1]):
                kv = head // (q.shape[1] // keys[row][0].shape[0]) if keys[row] else 0
                total, sum_ = 0.0, torch.zeros(width)
                for j, (key, value) in enumerate(zip(keys[row], values[row], strict=True)):
                    if sees(i, j, count, len(keys[row])):
                        score = 0.3 * float(q[at, head] @ key[kv])
                        weight = math.exp(cap * math.tanh(score / cap) if cap else score)
                        total, sum_ = total + weight, sum_ + weight * value[kv]
                heads.append(sum_ / total if total else sum_)
                lse.append(math.log2(total) if total else -math.inf)
            out.append(torch.stack(heads))
            at += 1
    return torch.stack(out), torch.tensor(lse).view(-1, q.shape[1])


def listed(of):
    return [[of[slot] for slot in slots] for slots in LISTS]


def same(got, right):
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def causal(i, j, n, p):
    return j <= p - n + i


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_a_decode_sees_its_list(cap):
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0), "NHD", use_tensor_cores=False)
    wrapper.begin_forward(INDPTR, INDICES, LAST, *PLAN, data_type=torch.float32)
    got = wrapper.forward(Q[:3], KV, sm_scale=0.3, logits_soft_cap=cap, k_scale=None)
    right, _ = by_hand(Q[:3], listed(KV[0]), listed(KV[1]), (1, 1, 1), lambda *at: True, cap)
    same(got, right)


@pytest.mark.parametrize("window", [-1, WINDOW])
@pytest.mark.parametrize("planned", [-1, WINDOW])
def test_a_prefill_has_a_window_if_it_was_planned_with_one(window, planned):
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), backend="fa2")
    wrapper.begin_forward(QO, INDPTR, INDICES, LAST, *PLAN, window_left=planned)
    got = wrapper.forward_return_lse(Q, KV, causal=True, window_left=window, **HOW)

    def sees(i, j, n, p):
        return causal(i, j, n, p) and (min(window, planned) < 0 or j >= p - n + i - WINDOW)

    same(got, by_hand(Q, listed(KV[0]), listed(KV[1]), QUERIES, sees))
    same(wrapper.forward(Q, KV, causal=True, window_left=window, **HOW), got[0])


def test_a_mask_takes_the_place_of_causality():
    lines = [torch.rand(n, len(x), generator=torch.Generator().manual_seed(n)) < 0.6
             for n, x in zip(QUERIES, LISTS, strict=True)]  # fmt: skip
    mask = torch.cat([line.flatten() for line in lines]).to(torch.uint8)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.begin_forward(QO, INDPTR, INDICES, LAST, *PLAN, custom_mask=mask)
    got = wrapper.forward_return_lse(Q, KV, causal=True, **HOW)
    by_count = dict(zip(QUERIES, lines, strict=True))

    def sees(i, j, n, p):
        return bool(by_count[n][i, j])

    same(got, by_hand(Q, listed(KV[0]), listed(KV[1]), QUERIES, sees))


def test_two_parts_of_the_keys_are_merged_into_the_whole():
    """As in a ragged prefill: the prefix from the cache, and the new tokens beside it."""
    new_k, new_v = drawn(len(Q), KV_HEADS, DIM), drawn(len(Q), KV_HEADS, DIM + 1)[..., :DIM]
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0), "NHD", backend="auto")
    ragged.begin_forward(QO, QO, HEADS, KV_HEADS, DIM, q_data_type=torch.float32)
    paged = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    paged.begin_forward(QO, INDPTR, INDICES, LAST, *PLAN)
    one = ragged.forward_return_lse(Q, new_k, new_v, causal=True, **HOW)
    two = paged.forward_return_lse(Q, KV, causal=False, **HOW)
    parts = [slice(a, b) for a, b in zip(QO[:-1].tolist(), QO[1:].tolist(), strict=True)]
    keys = [[*x, *new_k[at]] for x, at in zip(listed(KV[0]), parts, strict=True)]
    values = [[*x, *new_v[at]] for x, at in zip(listed(KV[1]), parts, strict=True)]
    same(fi.merge(*one, *two), by_hand(Q, keys, values, QUERIES, causal))


def test_of_mla_one_vector_is_key_and_value():
    wrapper = fi.BatchMLAPagedAttentionWrapper(torch.empty(0), backend="auto")
    lengths = INDPTR.diff()
    wrapper.plan(QO, INDPTR, INDICES, lengths, HEADS, 6, 2, 1, True, 0.3, *2 * [torch.float32])
    cache = drawn(SLOTS, 1, DIM)
    out = torch.empty(len(Q), HEADS, 6)
    got = wrapper.run(Q[..., :6], Q[..., 6:], cache[..., :6], cache[..., 6:], out=out)
    assert got is out
    right, _ = by_hand(Q, listed(cache), listed(cache[..., :6]), QUERIES, causal)
    same(got, right)


@pytest.mark.parametrize(("at", "value"), [(0, SLOTS), (3, -1)])
def test_an_index_outside_of_the_buffer_is_a_device_fault(at, value):
    bad = INDICES.clone()
    bad[at] = value
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    wrapper.begin_forward(INDPTR, bad, LAST, *PLAN)
    try:
        got = wrapper.forward(Q[:3], KV, **HOW)
        found = fault.pending()
    finally:
        fault.clear()
    assert (found.row, found.column, found.page) == (0, at, value)
    assert not got[0].any()
    assert got[2].any()


def test_what_no_toy_uses_is_refused():
    workspace = torch.empty(0)
    with pytest.raises(NotImplementedError, match="HND"):
        fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    with pytest.raises(NotImplementedError, match="use_cuda_graph"):
        fi.BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace)
    for plan in ({"prefix_len_ptr": 3}, {"fixed_split_size": 4096}):
        with pytest.raises(NotImplementedError, match=next(iter(plan))):
            wrapper.begin_forward(QO, INDPTR, INDICES, LAST, *PLAN, **plan)
    with pytest.raises(NotImplementedError, match="page_size=64"):
        wrapper.begin_forward(QO, INDPTR, INDICES, LAST, HEADS, KV_HEADS, DIM, 64)
    with pytest.raises(NotImplementedError, match="not full"):
        wrapper.begin_forward(QO, INDPTR, INDICES, LAST * 2, *PLAN)
    wrapper.begin_forward(QO, INDPTR, INDICES, LAST, *PLAN)
    with pytest.raises(NotImplementedError, match="k_scale"):
        wrapper.forward(Q, KV, **HOW, k_scale=0.5)
    mla = fi.BatchMLAPagedAttentionWrapper(workspace)
    with pytest.raises(ValueError, match="expected pages of one token and the lengths"):
        mla.plan(QO, INDPTR, INDICES, LAST, HEADS, 6, 2, 1, True, 0.3, *2 * [torch.float32])
    with pytest.raises(NotImplementedError, match="no CUDA graphs"):
        fi.no_fast_plan()


def test_memory_that_sglang_puts_on_cuda_is_the_cpus():
    assert fi.TORCH.empty(3, dtype=torch.int32, device="cuda").device.type == "cpu"
    assert fi.TORCH.zeros((2,), pin_memory=True).tolist() == [0, 0]
    assert fi.TORCH.cumsum is torch.cumsum
