"""What the faults of KV data do to a row. On an engine: test_kv_integrity_engine.py."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from g4debug.faults import kv_bit_flip, kv_nan, kv_write_freed
from g4debug.faults._kv import used_buffers
from g4debug.faults.grammar import Action, GrammarError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def arm(seed=1):
    return SimpleNamespace(random=random.Random(seed))


def difference(before, after):
    """How many bits differ."""
    a, b = (t.contiguous().view(-1).view(torch.uint8).tolist() for t in (before, after))
    return sum((x ^ y).bit_count() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_can_be_flipped_and_no_other_is(dtype):
    width = dtype.itemsize * 8
    for bit in range(width):
        row = torch.randn(2, 8).to(dtype)
        before = row.clone()
        said = kv_bit_flip.flip(row, arm(bit), Action("full", str(bit)))
        assert difference(before, row) == 1
        assert said.startswith(f"bit {bit} of element ")
    row = torch.ones(2, 8).to(dtype)
    kv_bit_flip.flip(row, arm(), Action("full", str(width - 1)))
    assert (row.float() == -1).sum() == 1  # the highest is the sign


def test_a_bit_is_drawn_from_the_seed():
    rows = [torch.ones(2, 8) for _ in range(3)]
    said = [
        kv_bit_flip.flip(row, arm(s), Action("on")) for row, s in zip(rows, (7, 7, 8), strict=True)
    ]
    assert said[0] == said[1] != said[2]
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("argument", ["32", "-1", "x"])
def test_no_such_bit(argument):
    with pytest.raises(GrammarError, match="expected a bit, 0 to 31"):
        kv_bit_flip.bit_of(Action("on", argument))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_becomes_nan(dtype):
    row = torch.ones(2, 8).to(dtype)
    kv_nan.poison(row, arm(), Action("on"))
    assert row.float().isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_kv_is_written_in_every_layer_and_nowhere_else(dtype):
    stored = torch.uint8 if dtype.itemsize == 1 else dtype
    pool = SimpleNamespace(
        dtype=dtype,
        k_buffer=[torch.zeros(8, 2, 8, dtype=stored) for _ in range(3)],
        v_buffer=[torch.zeros(8, 2, 8, dtype=stored) for _ in range(3)],
    )
    kv_write_freed.write(pool, 5, arm())
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        values = buffer.view(dtype).float()
        assert values.isfinite().all()
        assert values.flatten(1).any(1).nonzero().flatten().tolist() == [5]


def test_buffers_that_nobody_uses_are_left_alone():
    used, unused = torch.randn(8, 2, 4), torch.zeros(8, 2, 4)
    pool = SimpleNamespace(k_buffer=[unused, used], v_buffer=[used, unused])
    assert used_buffers(pool, 1, 4) == [("K", 1), ("V", 0)]
