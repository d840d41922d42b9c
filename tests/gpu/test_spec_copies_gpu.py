"""spec-lifecycle brings what a step had on the device to the host, and never waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from g4debug.tracers.spec_lifecycle import canary
from g4debug.tracers.spec_lifecycle.copies import MOST, SMALLEST, Copies, Pool
from g4debug.tracers.spec_lifecycle.hidden_states import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LENS = [130, 1, 512]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_values_are_those_of_when_the_copy_was_started(dtype):
    copies = Copies(Pool())
    lens = torch.tensor(LENS, dtype=dtype, device="cuda")
    copies.start("lens", lens)
    copies.start("none", None)
    lens.fill_(0)  # what comes behind in the stream does not matter
    copies.close()
    torch.cuda.synchronize()
    assert copies.get() == {"lens": LENS}


def test_it_never_waits():
    copies, pool = None, Pool()
    busy = torch.rand(4096, 4096, device="cuda")
    lens = torch.tensor(LENS, dtype=torch.int32, device="cuda")
    pool.give(pool.take(3))  # pinning memory waits, once
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(200):
            busy = busy @ busy
        torch.cuda.set_sync_debug_mode("error")
        try:
            copies = Copies(pool)
            copies.start("lens", lens)
            copies.close()
            assert copies.get() is None  # the stream is still busy
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert copies.get() == {"lens": LENS}


def test_a_batch_that_grows_and_buffers_that_run_out():
    pool = Pool()
    for size in (1, SMALLEST, 3 * SMALLEST):
        copies = Copies(pool)
        copies.start("lens", torch.arange(size, device="cuda"))
        copies.close()
        torch.cuda.synchronize()
        assert copies.get() == {"lens": list(range(size))}
    waiting = Copies(pool)
    for i in range(4 * MOST + 1):
        waiting.start(str(i), torch.arange(3, device="cuda"))
        waiting.close()
    assert waiting.lost
    waiting.drop()
    again = Copies(pool)
    again.start("lens", torch.arange(3, device="cuda"))
    again.close()
    assert not again.lost


def test_values_of_several_types_and_shapes_go_in_one_piece():
    copies = Copies(Pool())
    rows = torch.arange(8, device="cuda").view(2, 4)
    copies.start_all({"rows": rows, "lens": torch.tensor(LENS, dtype=torch.int32, device="cuda")})
    copies.start_all({"child": rows[:, 1:], "host": torch.tensor([5])})
    rows.fill_(0)
    copies.close()
    copies.close()
    torch.cuda.synchronize()
    wanted = {"rows": [*range(8)], "lens": LENS, "child": [1, 2, 3, 5, 6, 7], "host": [5]}
    assert copies.get() == wanted


def test_a_buffer_comes_back_from_a_step_that_nobody_looks_at():
    pool = Pool()
    for _ in range(8 * MOST):
        copies = Copies(pool)
        copies.start("lens", torch.arange(3, device="cuda"))
        copies.close()
        assert not copies.lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_digest_is_the_same_on_the_host(dtype):
    hidden = torch.randn(7, 5376).to(dtype)
    assert digest(hidden.cuda()).tolist() == digest(hidden).tolist()
    assert digest(hidden.cuda()[2:4]).tolist() == digest(hidden).tolist()[2:4]


def test_the_canary_bites_on_the_gpu(tmp_path: Path):
    assert canary.fire(tmp_path, torch.device("cuda"))
