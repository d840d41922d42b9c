"""The sums of rows: the kernels, by Triton's interpreter, beside torch; and what they notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.prefix_cache import lent_rows
from g4debug.tracers.prefix_cache.lent_rows import BLOCK, LentRows, weights_of

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here"),
]
NOW = ("r", 32, 7)


def row_of(pages: list[int], size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


@pytest.mark.parametrize("count", [1, 64, BLOCK, BLOCK + 40])
@pytest.mark.parametrize("wrong", [False, True])
def test_kernels_and_torch_say_the_same(count, wrong):
    slots = torch.randperm(2 * BLOCK, generator=torch.Generator().manual_seed(count))[:count]
    table = torch.zeros((4, BLOCK + 100), dtype=torch.int32)
    table[2, :count] = slots.to(torch.int32)
    table[2, count:] = 77  # behind what the prefix cache has, a row says nothing of it
    if wrong:
        table[2, count - 1] += 1
    weights = weights_of(table.shape[1])
    sums, flags = [], []
    for kernel in (False, True):
        expected = torch.zeros((4, 2), dtype=torch.int64)
        marks = torch.zeros(4, dtype=torch.int64)
        rows = torch.tensor([3, 2, -1, 99, 0], dtype=torch.int32)  # some of them no rows
        if kernel:
            lent_rows._launch_expect((1, 1, 1), (slots, weights, expected), (2, count), (BLOCK,))
            tensors = (table, rows, weights, expected, marks)
            lent_rows._launch_compare((5, 1, 1), tensors, (4, table.stride(0)), (BLOCK,))
        else:
            lent_rows.expect(slots, weights, expected, 2, count)
            lent_rows.compare(table, rows, weights, expected, marks)
        sums.append(expected)
        flags.append(marks)
    assert torch.equal(*sums)
    assert torch.equal(*flags)
    assert flags[0].tolist() == [0, 0, count if wrong else 0, 0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_the_row_has_instead_is_noticed(data):
    """Exchanged, shifted and foreign pages of a small pool, where sums could meet."""
    size = data.draw(st.sampled_from([1, 16]))
    pages = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=8, unique=True))
    other = data.draw(
        st.one_of(
            st.permutations(pages),
            st.lists(st.integers(0, 12), min_size=len(pages), max_size=len(pages)),
        )
    )
    table = torch.zeros((3, 8 * 16), dtype=torch.int32)
    rows = LentRows(table)
    right, has = row_of(pages, size), row_of(list(other), size)
    table[1, : len(has)] = has.to(torch.int32)
    rows.learn(1, ("r", len(right), 7), right)
    rows.compare(torch.tensor([1, 2]))
    assert rows.take() == ([1] if list(other) != pages else [])


def test_what_is_told_is_not_told_again_until_it_changes():
    table = torch.zeros((3, 64), dtype=torch.int32)
    rows, batch = LentRows(table), torch.tensor([1])
    rows.learn(1, NOW, torch.arange(32))
    rows.compare(batch)
    assert rows.take() == [1]
    rows.tell(1)
    rows.compare(batch)
    assert rows.take() == []
    rows.learn(1, NOW, torch.arange(32))
    rows.compare(batch)
    assert rows.take() == [1]
    rows.forget(1)
    rows.compare(batch)
    assert rows.take() == []
    assert rows.known == {}


def test_a_step_without_a_comparison_keeps_its_place():
    table = torch.zeros((3, 64), dtype=torch.int32)
    rows = LentRows(table)
    rows.learn(1, NOW, torch.arange(32))
    rows.compare(None)
    rows.compare(torch.tensor([1]))
    assert len(rows._events) == 2
    rows.take()
    rows.take()
    assert not rows._events
