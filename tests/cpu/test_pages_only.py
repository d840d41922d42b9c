"""Attention that only looks at pages looks at the same ones as the attention that computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.cpu import fault, paged_attention, pages_only

pytestmark = pytest.mark.once("the code is ours alone")

PAGE, PAGES, HEADS, DIM = 4, 9, 2, 8


@settings(max_examples=examples(80), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    queries=st.integers(1, 4),
    window=st.sampled_from([-1, 5, 11]),
    bad=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=3),
)
def test_the_same_faults_at_the_same_cells(
    seed: int, lengths: list[int], queries: int, window: int, bad: list[tuple[int, int]]
) -> None:
    torch.manual_seed(seed)
    table = torch.randint(0, PAGES, (len(lengths), 8), dtype=torch.int32)
    for row, column in bad:
        if row < len(lengths):
            table[row, column] = PAGES + 3
    cache = (torch.randn(PAGES, HEADS, PAGE, DIM), torch.randn(PAGES, HEADS, PAGE, DIM))
    starts = [n * queries for n in range(len(lengths) + 1)]
    query = torch.randn(starts[-1], 2 * HEADS, DIM)
    lens = torch.tensor([max(n, queries) if n else 0 for n in lengths])
    found: list[list[Any]] = []
    for attend_row in (paged_attention.attend_row, pages_only.attend_row):
        seen: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fault, "record", seen.append)
            patch.setattr(paged_attention, "attend_row", attend_row)
            inputs = (query, cache, table, lens, starts)
            out = paged_attention.attend("kernel", *inputs, 1.0, 1.0, window, None, None)
        assert out.shape == query.shape
        found.append(seen)
    assert found[0] == found[1]
