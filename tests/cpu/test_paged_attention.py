"""The attention stand-in against an explicit loop in float64 over token positions."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.cpu import fault, paged_attention

pytestmark = pytest.mark.once("the code is ours alone")

PAGE = 4


def naive(q, k, v, tokens, window, scale1, scale2, sinks=None):
    """q [m, hq, d], k/v [n, hkv, d] already in token order; no paging, no batching."""
    m, hq, d = q.shape
    out = torch.zeros(m, hq, d, dtype=torch.float64)
    for i in range(m):
        position = tokens - m + i
        for h in range(hq):
            kv = h // (hq // k.shape[1])
            low = 0 if window < 0 else max(0, position - window)
            scores = [
                scale1 * sum(float(a) * float(b) for a, b in zip(q[i, h], k[t, kv], strict=True))
                for t in range(low, position + 1)
            ]
            sink = [] if sinks is None else [float(sinks[h])]
            top = max(scores + sink)
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights) + sum(math.exp(s - top) for s in sink)
            for w, t in zip(weights, range(low, position + 1), strict=True):
                out[i, h] += scale2 * (w / total) * v[t, kv].double()
    return out


def paged_case(seed, lengths, heads, kv_heads, dim, garbage_columns=1):
    """Random K/V in token order, and the same laid out in shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    columns = [-(-n // PAGE) for n in lengths]
    order = (torch.randperm(sum(columns), generator=generator) + 1).tolist()
    pages = sum(columns) + 1
    cache = torch.full((2, pages, kv_heads, PAGE, dim), 1e4)  # unread slots would be seen
    table = torch.full((len(lengths), max(columns) + garbage_columns), 10**6, dtype=torch.int32)
    flat = []
    for b, n in enumerate(lengths):
        kv = torch.randn(2, n, kv_heads, dim, generator=generator)
        flat.append(kv)
        for j in range(columns[b]):
            table[b, j] = page = order.pop()
            part = kv[:, j * PAGE : (j + 1) * PAGE]
            cache[:, page, :, : part.shape[1]] = part.transpose(1, 2)
    return flat, (cache[0], cache[1]), table, generator


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=3),
    queries=st.integers(1, 4),
    window=st.sampled_from([-1, 0, 1, 3, 5, 50]),
    heads=st.sampled_from([(2, 1), (4, 2), (2, 2)]),
    sunk=st.booleans(),
)
def test_decode_and_verify_equal_the_naive_loop(seed, lengths, queries, window, heads, sunk):
    lengths = [max(n, queries) for n in lengths]
    flat, cache, table, generator = paged_case(seed, lengths, *heads, dim=3)
    q = torch.randn(len(lengths) * queries, heads[0], 3, generator=generator)
    sinks = 3 * torch.randn(heads[0], generator=generator) if sunk else None
    got = paged_attention.trtllm_batch_decode_with_kv_cache(
        q, cache, torch.empty(0), table, torch.tensor(lengths, dtype=torch.int32), 64,
        bmm1_scale=0.7, bmm2_scale=1.3, window_left=window, q_len_per_req=queries,
        sinks=sinks,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        rows = slice(b * queries, (b + 1) * queries)
        want = naive(q[rows], flat[b][0], flat[b][1], n, window, 0.7, 1.3, sinks)
        torch.testing.assert_close(got[rows].double(), want, atol=1e-5, rtol=1e-5)
    assert fault.pending() is None  # the garbage past each row's length was not looked at


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)), min_size=1, max_size=3),
    window=st.sampled_from([-1, 2, 6]),
    sunk=st.booleans(),
)
def test_context_with_ragged_queries_equals_the_naive_loop(seed, rows, window, sunk):
    lengths = [prefix + new for prefix, new in rows]
    flat, cache, table, generator = paged_case(seed, lengths, 2, 1, dim=4)
    cum = [0]
    for _, new in rows:
        cum.append(cum[-1] + new)
    q = torch.randn(cum[-1], 2, 4, generator=generator)
    sinks = 3 * torch.randn(2, generator=generator) if sunk else None
    got = paged_attention.trtllm_batch_context_with_kv_cache(
        q, cache, torch.empty(0), table, torch.tensor(lengths), 64, 64, 1.0, 1.0, len(rows),
        torch.tensor(cum, dtype=torch.int32), torch.tensor(cum), window_left=window,
        sinks=sinks,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        part = slice(cum[b], cum[b + 1])
        want = naive(q[part], flat[b][0], flat[b][1], n, window, 1.0, 1.0, sinks)
        torch.testing.assert_close(got[part].double(), want, atol=1e-5, rtol=1e-5)


def test_out_dtype_is_honoured():
    _, cache, table, generator = paged_case(0, [5], 2, 1, dim=4)
    q = torch.randn(1, 2, 4, generator=generator).bfloat16()
    out = paged_attention.trtllm_batch_decode_with_kv_cache(
        q, cache, torch.empty(0), table, torch.tensor([5]), 64, out_dtype=torch.float32
    )
    assert out.dtype is torch.float32


def test_out_is_written_and_returned():
    _, cache, table, generator = paged_case(0, [5, 9], 2, 1, dim=4)
    q = torch.randn(2, 2, 4, generator=generator)
    lengths, cum = torch.tensor([5, 9]), torch.tensor([0, 1, 2])
    decode = (q, cache, torch.empty(0), table, lengths, 64)
    context = (*decode, 64, 1.0, 1.0, 2, cum, cum)
    for kernel, arguments in (
        (paged_attention.trtllm_batch_decode_with_kv_cache, decode),
        (paged_attention.trtllm_batch_context_with_kv_cache, context),
    ):
        want, out = kernel(*arguments), torch.full_like(q, 7.0)
        assert kernel(*arguments, out=out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("out", "dtype"), [(torch.zeros(1, 8), None), (torch.zeros(1, 2, 4), torch.bfloat16)]
)
def test_another_out_is_refused(out, dtype):
    _, cache, table, _ = paged_case(0, [5], 2, 1, dim=4)
    with pytest.raises(ValueError, match="got out of shape"):
        paged_attention.trtllm_batch_decode_with_kv_cache(
            torch.zeros(1, 2, 4), cache, torch.empty(0), table, torch.tensor([5]), 64,
            out=out, out_dtype=dtype,
        )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["kv_cache_sf", "mask", "cum_seq_lens_q", "skip_softmax_threshold_scale_factor"],
)
def test_what_no_toy_uses_is_refused_by_name(name):
    _, cache, table, _ = paged_case(0, [5], 2, 1, dim=4)
    with pytest.raises(NotImplementedError, match=name.removesuffix("_threshold_scale_factor")):
        paged_attention.trtllm_batch_decode_with_kv_cache(
            torch.zeros(1, 2, 4), cache, torch.empty(0), table, torch.tensor([5]), 64,
            **{name: torch.zeros(2)},
        )  # fmt: skip


def test_a_prefill_that_is_not_causal_is_refused():
    _, cache, table, _ = paged_case(0, [5], 2, 1, dim=4)
    cum = torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="causal=False"):
        paged_attention.trtllm_batch_context_with_kv_cache(
            torch.zeros(1, 2, 4), cache, torch.empty(0), table, torch.tensor([5]), 64, 64, 1.0,
            1.0, 1, cum, cum, causal=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "queries", "window", "want"),
    [
        (1, 1, -1, [0]),
        (9, 1, -1, [0, 1, 2]),
        (8, 1, -1, [0, 1]),
        (9, 1, 0, [2]),
        (9, 1, 4, [1, 2]),
        (9, 4, 4, [0, 1, 2]),  # the first of four queries, at 5, still sees key 1
        (9, 4, 1, [1, 2]),
    ],
)
def test_live_columns(tokens, queries, window, want):
    assert list(paged_attention.live_columns(tokens, queries, PAGE, window)) == want
