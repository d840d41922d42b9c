"""Stamps and digests on SGLang's real KV buffers, in every dtype of a KV cache."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.kv_integrity.kv_pages import STAMP, WORDS, KvPages, Unsupported

PAGES, SIZE, LAYERS, HEADS, DIM = 5, 4, 2, 2, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def random_kv(dtype, device="cpu"):
    """k_buffer and v_buffer as MHATokenToKVPool has them: fp8 is kept as bytes."""
    stored = torch.uint8 if dtype.itemsize == 1 else dtype

    def buffer():
        return torch.randn(PAGES * SIZE, HEADS, DIM).to(dtype).view(stored).to(device)

    k, v = [buffer() for _ in range(LAYERS)], [buffer() for _ in range(LAYERS)]
    return SimpleNamespace(k_buffer=k, v_buffer=v, dtype=dtype)


def pages(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_fits_sglangs_pools(sglang, dtype):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=PAGES * SIZE - SIZE, page_size=SIZE, dtype=dtype, head_num=HEADS, head_dim=DIM,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    kv = KvPages(pool, PAGES, SIZE)
    assert kv.has_floats
    kv.stamp(pages(1, 3))
    assert not kv.written(pages(1, 3)).any()
    pool.k_buffer[1][3 * SIZE + 2] = 1
    assert kv.written(pages(1, 3)).tolist() == [[0, 2 * SIZE + 2 + 1], [0, 1]]
    assert kv.place(2 * SIZE + 2 + 1) == (1, "K", 2)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_it_fits_sglangs_pool_of_mla(sglang):
    """K and V are one vector of a token, in one buffer for each layer."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    pool = MLATokenToKVPool(
        size=PAGES * SIZE - SIZE, page_size=SIZE, dtype=torch.bfloat16, kv_lora_rank=64,
        qk_rope_head_dim=16, layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    kv = KvPages(pool, PAGES, SIZE)
    kv.stamp(pages(1, 3))
    kv.seal(pages(2))
    pool.kv_buffer[1][3 * SIZE + 2, 0, 0] = 1
    ((_, code), _) = kv.written(pages(1, 3)).tolist()
    assert kv.place(code) == (1, "KV", 2)
    pool.kv_buffer[0][2 * SIZE] = torch.nan
    ((code,), _) = kv.changed(pages(2)).tolist()
    assert kv.buffer(code) == (0, "KV")
    assert kv.not_finite(pages(2)).tolist() == [[1], [1]]
    pool.__class__ = type("DSATokenToKVPool", (MLATokenToKVPool,), {})
    with pytest.raises(Unsupported, match="DSATokenToKVPool packs a row"):
        KvPages(pool, PAGES, SIZE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stamp_is_a_small_finite_number(dtype):
    """A kernel multiplies what it masked out by zero; NaN and Inf would come through."""
    word = torch.full((WORDS,), STAMP, dtype=torch.int16)
    value = word.view(dtype).float()
    assert torch.isfinite(value).all()
    assert value.abs().max() < 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_stamped_and_nothing_else(dtype):
    pool = random_kv(dtype)
    kv = KvPages(pool, PAGES, SIZE)
    before = [b.clone() for b in kv.buffers]
    kv.stamp(pages(2))
    for b, was in zip(kv.buffers, before, strict=True):
        mine = slice(2 * SIZE, 3 * SIZE)
        assert (b[mine].view(SIZE, -1).view(torch.int16)[:, :WORDS] == STAMP).all()
        assert torch.equal(b[: 2 * SIZE].view(torch.uint8), was[: 2 * SIZE].view(torch.uint8))
        assert torch.equal(b[3 * SIZE :].view(torch.uint8), was[3 * SIZE :].view(torch.uint8))
    kv.unstamp(pages(2))
    kv.buffers[0][2 * SIZE] = 0
    assert not kv.written(pages(2)).any()  # it is somebody's


@given(
    dtype=st.sampled_from(DTYPES),
    buffer=st.integers(0, 2 * LAYERS - 1),
    page=st.integers(1, PAGES - 1),
    bit=st.integers(0, 2**20),
)
@settings(max_examples=examples(300), deadline=None)
def test_no_flipped_bit_goes_unseen(dtype, buffer, page, bit):
    kv = KvPages(random_kv(dtype), PAGES, SIZE)
    every = torch.arange(PAGES)
    kv.seal(every)
    assert not kv.changed(every).any()
    data = kv.buffers[buffer][page * SIZE : (page + 1) * SIZE].view(torch.uint8).view(-1)
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    code, count = kv.changed(every)[:, page].tolist()
    assert (code, count) == (buffer + 1, 1)
    assert kv.changed(every)[1].sum() == 1


def test_rows_that_change_places_are_seen():
    kv = KvPages(random_kv(torch.float32), PAGES, SIZE)
    kv.seal(pages(1))
    rows = kv.buffers[3][SIZE : 2 * SIZE]
    rows.copy_(rows.flip(0).clone())
    assert kv.changed(pages(1)).tolist() == [[4], [1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(dtype):
    kv = KvPages(random_kv(dtype), PAGES, SIZE)
    assert not kv.not_finite(torch.arange(PAGES)).any()
    kv.buffers[1].view(dtype)[3 * SIZE + 1, 1, 5] = float("nan")
    kv.buffers[2].view(dtype)[3 * SIZE, 0, 0] = float("nan")
    code, count = kv.not_finite(pages(2, 3))[:, 1].tolist()
    assert (kv.place(code), count) == ((0, "V", 1), 2)


def test_packed_elements_are_not_asked_for_nan():
    pool = random_kv(torch.bfloat16)
    pool.dtype = torch.uint8
    assert not KvPages(pool, PAGES, SIZE).has_floats


def test_no_pages_at_all():
    kv = KvPages(random_kv(torch.float32), PAGES, SIZE)
    for codes in (kv.written(pages()), kv.changed(pages()), kv.not_finite(pages())):
        assert codes.shape == (2, 0)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda p: delattr(p, "k_buffer"), "has neither k_buffer"),
        (lambda p: p.v_buffer.__setitem__(1, p.v_buffer[1][:-1]), "expected at least 20 rows"),
        (lambda p: p.k_buffer.__setitem__(0, p.k_buffer[0].transpose(1, 2)), "expected at least"),
    ],
)
def test_other_layouts_are_refused(break_it, says):
    pool = random_kv(torch.float32)
    break_it(pool)
    with pytest.raises(Unsupported, match=says):
        KvPages(pool, PAGES, SIZE)
