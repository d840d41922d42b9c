"""What the prefix cache lent, on a real GPU: the kernel beside torch, on rows of any content."""

from __future__ import annotations

import random

import pytest
import torch

from g4debug.findings.steps import Recorder
from g4debug.ledger.doubts import Doubts
from g4debug.ledger.owners import (
    BLOCK,
    EVERYTHING,
    Owners,
    both,
    launch_lend,
    place,
    reference_lend,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
ROWS, PAGES = 24, 900


def drawn(rng: random.Random, size: int, columns: int, dtype: torch.dtype):
    """(pages, protected, req_to_token, more): cells that name the page of another row or column,
    the same page twice, page 0, and pages that are not there."""
    table = torch.zeros(ROWS, columns * size, dtype=dtype)
    pages = torch.zeros(PAGES + 1, dtype=torch.int64)
    strange = [-1, -size, 0, PAGES * size, PAGES * size + 1, 2**31 - 1, -(2**31)]
    more = []
    for row in range(1, ROWS):  # 0 is nobody's
        numbers = [rng.randrange(1, PAGES) for _ in range(columns)]
        own_from = rng.choice((0, 1, columns // 2, columns - 1, columns))
        for column, page in enumerate(numbers):
            first = page * size
            if rng.random() < 0.1:
                first = rng.choice(strange)
            elif column >= own_from or rng.random() < 0.02:
                pages[page] = place(row, rng.choice((column, column, 0)))
            elif rng.random() < 0.5:
                pages[page] = place(rng.randrange(1, ROWS), column)
            table[row, column * size] = first
        begin, end = sorted(rng.sample(range(columns + 1), 2))
        # A prompt that is cached in part may begin within a page.
        more.append((row, begin * size + rng.randrange(size), end * size))
    rng.shuffle(more)
    protected = torch.tensor(
        [both(rng.choice((0, size, EVERYTHING)), rng.randrange(9)) for _ in range(ROWS)]
    )
    return pages, protected, table, more[: rng.randint(1, ROWS - 1)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_kernel_and_torch_say_the_same(size, dtype):
    rng = random.Random(size)
    kept = 0
    for columns in (1, 3, 40, BLOCK, BLOCK + 40) * 8:
        pages, protected, table, more = drawn(rng, size, columns, dtype)
        on_gpu = [t.to(CUDA) for t in (pages, protected, table)]
        before = protected.clone()
        reference_lend(pages, protected, table, more, size)
        launch_lend(*on_gpu, more, size)
        assert torch.equal(on_gpu[1].cpu(), protected)
        assert torch.equal(on_gpu[0].cpu(), pages)
        assert torch.equal(on_gpu[2].cpu(), table)
        others = torch.ones(ROWS, dtype=torch.bool)
        others[[row for row, _, _ in more]] = False
        assert torch.equal(protected[others], before[others])
        kept += int((protected[~others] >> 32 != protected[~others] % 2**32).sum())
    assert kept, "no row kept pages of its own, so nothing was tried"


def test_it_never_waits_and_rows_of_a_view_have_their_own_stride():
    size, columns = 16, 30
    pages, protected, table, more = drawn(random.Random(7), size, columns, torch.int32)
    wide = torch.full((ROWS, columns * size + 48), -7, dtype=torch.int32, device=CUDA)
    wide[:, : columns * size] = table.to(CUDA)
    view = wide[:, : columns * size]
    owners = Owners(PAGES, size, CUDA, lambda what, why: None, Doubts(Recorder(1)))
    owners.prepare(ROWS)
    assert owners.protected is not None
    owners.pages.copy_(pages)
    owners.protected.copy_(protected)
    launch_lend(owners.pages, owners.protected.clone(), view, more, size)  # compiled, and loaded
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        owners._lend(view, more)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reference_lend(pages, protected, table, more, size)
    assert torch.equal(owners.protected.cpu(), protected)
