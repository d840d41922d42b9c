"""The stand-ins of flashmla's and trtllm_mla's kernels against attention written token by token."""

from __future__ import annotations

import math

import pytest
import torch

from g4debug.cpu import fault
from g4debug.cpu.mla_kernels import (
    PAGE,
    fixup_zero_kv_rows,
    flash_mla_with_kvcache,
    plan_nothing,
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_ragged_attention_deepseek,
)

pytestmark = pytest.mark.once("the code is ours alone")

PAGES, HEADS, DIM, VALUE, SCALE = 6, 2, 12, 8, 0.3
LENGTHS = (3, 70)
NAMES = ("flash_mla_with_kvcache", "trtllm_batch_decode_with_kv_cache_mla")


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attended(q, keys, values):
    """One query ``[heads, dim]``, keys and values ``[tokens, heads, ...]``, in plain numbers."""
    out, sums = [], []
    for head in range(q.shape[0]):
        scores = [math.exp(SCALE * float(q[head] @ key[head])) for key in keys]
        total = sum(scores)
        out.append(sum(s / total * v[head] for s, v in zip(scores, values, strict=True)))
        sums.append(math.log(total))
    return torch.stack(out), torch.tensor(sums)


@pytest.fixture(params=NAMES)
def decode(request):
    """A decode of two rows, its table, and what the kernel is called with."""
    q, cache = drawn(2, 1, HEADS, DIM), drawn(PAGES, PAGE, 1, DIM)
    table = torch.tensor([[4, -1], [2, 5]], dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    def run(**more):
        if request.param == NAMES[0]:
            given = {"k_cache": cache, "block_table": table, "cache_seqlens": lengths}
            given |= {"head_dim_v": VALUE, "softmax_scale": SCALE, "causal": True}
            return flash_mla_with_kvcache(q, **(given | more))[0]
        given = {"kv_cache": cache.transpose(1, 2), "block_tables": table, "seq_lens": lengths}
        given |= {"kv_lora_rank": VALUE, "bmm1_scale": SCALE, "workspace_buffer": q}
        return trtllm_batch_decode_with_kv_cache_mla(q, **(given | more))

    return q, cache, table, run


def test_a_decode_attends_over_the_pages_of_its_table(decode):
    q, cache, table, run = decode
    out = run()
    assert out.shape == (2, 1, HEADS, VALUE)
    for row, n in enumerate(LENGTHS):
        keys = [cache[table[row, t // PAGE], t % PAGE].expand(HEADS, DIM) for t in range(n)]
        right, _ = attended(q[row, 0], keys, [key[:, :VALUE] for key in keys])
        torch.testing.assert_close(out[row, 0], right)


def test_a_page_that_the_cache_does_not_have_is_a_device_fault(decode, monkeypatch):
    *_, table, run = decode
    found = []
    monkeypatch.setattr(fault, "record", found.append)
    table[1, 1] = PAGES
    assert not run()[1].any()
    ((kernel, row, column, value),) = [(f.kernel, f.row, f.column, f.page) for f in found]
    assert kernel in NAMES
    assert (row, column, value) == (1, 1, PAGES)


@pytest.mark.parametrize("option", ["indices", "attn_sink", "return_lse", "unheard_of"])
def test_what_no_toy_uses_is_refused(decode, option):
    *_, run = decode
    with pytest.raises(NotImplementedError, match=option):
        run(**{option: True})


def test_flashmla_takes_pages_of_64_only():
    cache = drawn(2, 32, 1, DIM)
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="pages of another size"):
        flash_mla_with_kvcache(drawn(1, 1, HEADS, DIM), cache, one, one[0], VALUE, SCALE, True)


def test_a_plan_has_a_place_for_each_row():
    plan, splits = plan_nothing(torch.tensor(LENGTHS), HEADS, 1)
    assert (plan.shape[0], splits.shape[0]) == (1, len(LENGTHS) + 1)


@pytest.mark.parametrize("causal", [True, False])
def test_a_prefill_attends_over_the_keys_that_it_is_given(causal):
    queries, keys = (2, 3), ((2, 3) if causal else (4, 0))
    q, k, v = (
        drawn(5, HEADS, DIM),
        drawn(sum(keys), HEADS, DIM),
        drawn(sum(keys), HEADS, VALUE),
    )
    out = torch.full((5, HEADS, VALUE), math.nan)
    starts = [torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (queries, keys)]
    given = {
        "bmm1_scale": SCALE,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "window_left": -1,
        "cum_seq_lens_q": starts[0],
        "cum_seq_lens_kv": starts[1],
        "seq_lens": torch.tensor(keys),
        "is_causal": causal,
        "return_lse": True,
        "out": out,
    }
    found, lse = trtllm_ragged_attention_deepseek(q, k, v, **given)
    assert found is out
    for row in range(2):
        for i in range(queries[row]):
            at, first = int(starts[0][row]) + i, int(starts[1][row])
            end = first + (keys[row] - queries[row] + i + 1 if causal else keys[row])
            if end == first:
                assert not out[at].any()
                assert lse[at].tolist() == [-math.inf] * HEADS
                continue
            right, sums = attended(q[at], k[first:end], v[first:end])
            torch.testing.assert_close(out[at], right)
            torch.testing.assert_close(lse[at], sums)
    with pytest.raises(NotImplementedError, match="a window"):
        trtllm_ragged_attention_deepseek(q, k, v, **{**given, "window_left": 3})


def test_rows_without_keys_are_wiped_and_no_others():
    out, lse = torch.full((5, HEADS, VALUE), 7.0), torch.full((5, HEADS), 7.0)
    fixup_zero_kv_rows(out, lse, torch.tensor([3, 0]), torch.tensor([0, 2, 5]), 3)
    assert out[:, 0, 0].tolist() == [7, 7, 0, 0, 0]
    assert lse[:, 1].tolist() == [7, 7, *[-math.inf] * 3]
