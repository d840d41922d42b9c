"""FlashAttention's stand-in against attention written token by token."""

from __future__ import annotations

import math

import pytest
import torch

from g4debug.cpu import fault
from g4debug.cpu.flash_attention import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

pytestmark = pytest.mark.once("the code is ours alone")

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 16, 4, 2, 8
LENGTHS, QUERIES = (3, 9, 14), (3, 2, 1)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def case(value_dim=DIM):
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:12].view(3, 4)
    return {
        "q": drawn(sum(QUERIES), HEADS, DIM),
        "k_cache": drawn(PAGES, PAGE, KV_HEADS, DIM),
        "v_cache": drawn(PAGES, PAGE, KV_HEADS, value_dim),
        "page_table": table.int(),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        "softmax_scale": 0.3,
        "causal": True,
    }


def by_hand(of, left=-1, sinks=None):
    """One query, one head and one key at a time, in plain numbers."""
    out, at = [], 0
    qv = of.get("qv")
    for row, (n, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        for i in range(count):
            position = n - count + i
            first = max(0, position - left) if left >= 0 else 0
            heads = []
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores, values = [], []
                for key in range(first, position + 1):
                    page, slot = int(of["page_table"][row, key // PAGE]), key % PAGE
                    value = of["v_cache"][page, slot, kv]
                    score = float(of["q"][at, head] @ of["k_cache"][page, slot, kv])
                    score += 0.0 if qv is None else float(qv[at, head] @ value)
                    scores.append(math.exp(0.3 * score))
                    values.append(value)
                rest = 0.0 if sinks is None else math.exp(float(sinks[head]))
                total = sum(scores) + rest
                heads.append(sum(s / total * v for s, v in zip(scores, values, strict=True)))
            out.append(torch.stack(heads))
            at += 1
    return torch.stack(out)


@pytest.mark.parametrize("left", [-1, 0, 2, 20])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_it_is_attention(left, sinks):
    of = case()
    got = flash_attn_with_kvcache(**of, window_size=(left, 0 if left >= 0 else -1), sinks=sinks)
    torch.testing.assert_close(got, by_hand(of, left, sinks), rtol=1e-4, atol=1e-5)


def test_with_mla_the_score_has_two_parts():
    of = case(value_dim=12) | {"qv": drawn(sum(QUERIES), HEADS, 12)}
    got = flash_attn_with_kvcache(**of)
    torch.testing.assert_close(got, by_hand(of), rtol=1e-4, atol=1e-5)


def test_without_a_cache_the_keys_are_those_of_the_row():
    """The same numbers, taken out of the cache."""
    of = case(value_dim=12)
    rows = [
        [(int(table[i // PAGE]), i % PAGE) for i in range(n)]
        for table, n in zip(of["page_table"], LENGTHS, strict=True)
    ]
    k, v = (
        torch.stack([of[name][place] for row in rows for place in row])
        for name in ("k_cache", "v_cache")
    )
    got = flash_attn_varlen_func(
        of["q"], k, v, cu_seqlens_q=of["cu_seqlens_q"], softmax_scale=0.3, causal=True,
        cu_seqlens_k=torch.tensor([0, *LENGTHS]).cumsum(0), max_seqlen_q=3, max_seqlen_k=14,
    )  # fmt: skip
    torch.testing.assert_close(got, by_hand(of), rtol=1e-4, atol=1e-5)


def test_how_a_gpu_plans_it_makes_no_difference():
    of = case()
    how = {"num_splits": 3, "ver": 4, "max_seqlen_q": 3, "return_softmax_lse": False}
    assert get_scheduler_metadata(batch_size=3) is None
    assert torch.equal(flash_attn_with_kvcache(**of, **how), flash_attn_with_kvcache(**of))


@pytest.mark.parametrize(
    "option", [{"causal": False}, {"softcap": 30.0}, {"window_size": (4, 4)}, {"rel_bias": 1}]
)
def test_what_no_toy_uses_is_refused(option):
    with pytest.raises(NotImplementedError, match=next(iter(option)).split("_")[0]):
        flash_attn_with_kvcache(**{**case(), **option})


def test_a_page_that_the_cache_does_not_have_is_a_device_fault(monkeypatch):
    seen = []
    monkeypatch.setattr(fault, "record", seen.append)
    of = case()
    of["page_table"][1, 2] = 99
    of["page_table"][2, 0] = -5  # before the window: never read
    out = flash_attn_with_kvcache(**of, window_size=(2, 0))
    ((kernel, row, column, value),) = [(f.kernel, f.row, f.column, f.page) for f in seen]
    assert (kernel, row, column, value) == ("flash_attn_with_kvcache", 1, 2, 99)
    assert not out[3:5].any()
