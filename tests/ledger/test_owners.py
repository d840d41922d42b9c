"""What the prefix cache lent: the kernel, run by Triton's interpreter, beside torch."""

from __future__ import annotations

import random

import pytest
import torch

from g4debug.ledger.owners import BLOCK, both, launch_lend, place, reference_lend

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here"),
]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("columns", [3, BLOCK + 40])
@pytest.mark.parametrize("lent", [0, 1, 2, "all"])
def test_kernel_and_torch_say_the_same(size, columns, lent):
    rng = random.Random(columns)
    table = torch.zeros(4, columns * size, dtype=torch.int32)
    pages = torch.zeros(2 * columns + 3, dtype=torch.int64)
    row, first = 2, 1
    of_cache = columns if lent == "all" else first + lent
    numbers = rng.sample(range(1, 2 * columns + 2), columns)
    for column, page in enumerate(numbers):
        table[row, column * size : (column + 1) * size] = torch.arange(size) + page * size
        pages[page] = place(3 if column < of_cache else row, column)
    found = []
    for how in (reference_lend, launch_lend):
        protected = torch.full((4,), both(size, size))
        how(pages, protected, table, [(row, first * size, columns * size)], size)
        found.append(protected)
    assert torch.equal(*found)
    expected = size if lent == 0 else of_cache * size
    assert int(found[0][row]) == both(expected, columns * size)
