"""What the prefix cache has of each row, on a real GPU: the kernels beside torch."""

from __future__ import annotations

import pytest
import torch

from g4debug.tracers.prefix_cache.lent_rows import (
    LentRows,
    State,
    compare,
    expect,
    slices,
    weights_of_a_slice,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS, TOKENS = 70, 131_072 + 4


class Request:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("most", [64, 4096, 5000, 131_072])
def test_kernels_and_torch_say_the_same(most, dtype):
    draw = torch.Generator().manual_seed(most)
    weights = weights_of_a_slice()
    table = torch.randint(0, 1 << 30, (ROWS, TOKENS), generator=draw, dtype=torch.int32)
    expected = torch.zeros((ROWS, 1 + slices(TOKENS)), dtype=torch.int64)
    on_gpu = expected.cuda()
    for row in range(1, ROWS):
        count = int(torch.randint(1, most + 1, (1,), generator=draw))
        slots = table[row, :count].to(torch.int64)
        if row % 3 == 0:
            slots[count // 2] += 1
        expect(slots, weights, expected, row, count, False)
        expect(slots.cuda(), weights.cuda(), on_gpu, row, count, True)
    assert torch.equal(on_gpu.cpu(), expected)
    rows = torch.randperm(ROWS + 8, generator=draw)[: ROWS - 5].to(dtype) - 4  # some are no rows
    marks, seen = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    seen = seen.pin_memory()
    compare(table, rows, weights, expected, marks, most, False)
    compare(table.cuda(), rows.cuda(), weights.cuda(), on_gpu, seen, most, True)
    torch.cuda.synchronize()
    assert torch.equal(marks, seen)
    in_batch = {int(row) for row in rows if 0 < row < ROWS}
    assert set(marks.nonzero().flatten().tolist()) == {row for row in in_batch if row % 3 == 0}


def test_a_row_that_changes_is_told_at_its_step_and_not_before():
    table = torch.zeros((8, 1024), dtype=torch.int32, device="cuda")
    table[3, :512] = torch.arange(64, 576, dtype=torch.int32, device="cuda")
    rows = LentRows(table)
    batch = torch.tensor([3, 4], device="cuda")
    who = Request()
    rows.learn(3, who, State("r", 512, 7, 0), torch.arange(64, 576, device="cuda"))
    rows.compare(batch, 512)
    assert rows.take() == []
    table[3, 511] = 4
    rows.compare(None, 0)
    assert rows.take() == []
    rows.compare(batch, 512)
    assert rows.take() == [3]
