"""kv-integrity's operations on a real GPU: the same answers as on the CPU, and no waiting."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from g4debug.tracers.kv_integrity import canary
from g4debug.tracers.kv_integrity.kv_pages import KvPages
from g4debug.tracers.kv_integrity.watched import to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGES, SIZE, LAYERS, HEADS, DIM = 40, 64, 3, 2, 256


def random_kv(dtype):
    torch.manual_seed(0)
    stored = torch.uint8 if dtype.itemsize == 1 else dtype

    def buffer():
        return torch.randn(PAGES * SIZE, HEADS, DIM).to(dtype).view(stored)

    k, v = [buffer() for _ in range(LAYERS)], [buffer() for _ in range(LAYERS)]
    return SimpleNamespace(k_buffer=k, v_buffer=v, dtype=dtype)


def on_gpu(pool):
    moved = copy.copy(pool)
    moved.k_buffer = [b.cuda() for b in pool.k_buffer]
    moved.v_buffer = [b.cuda() for b in pool.v_buffer]
    return moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_same_answers_as_on_the_cpu_without_a_sync(dtype):
    pool = random_kv(dtype)
    host, device = KvPages(pool, PAGES, SIZE), KvPages(on_gpu(pool), PAGES, SIZE)
    every = torch.arange(PAGES)
    freed = torch.tensor([3, 7, 8])
    device.seal(to_device(every.numpy(), device.device))  # warm: the allocator, the weights
    torch.cuda.synchronize()
    answers = []
    for kv in (host, device):
        torch.cuda.set_sync_debug_mode("error")
        try:
            pages, some = (to_device(p.numpy(), kv.device) for p in (every, freed))
            kv.seal(pages)
            kv.stamp(some)
            kv.unstamp(some[:1])
            for buffer, row in ((0, 7 * SIZE + 5), (4, 8 * SIZE), (3, 20 * SIZE + 1)):
                kv.buffers[buffer][row] += 1
            kv.buffers[5].view(torch.int16)[30 * SIZE + 9, 1, 3].fill_(-1)  # NaN in all three
            found = [kv.written(pages), kv.changed(pages), kv.not_finite(pages)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        answers.append([*(f.cpu() for f in found), kv.digests.cpu()])
    assert all(map(torch.equal, *answers))
    written, changed, not_finite, _ = answers[1]
    assert written[0].nonzero().flatten().tolist() == [7, 8]
    assert changed[0].nonzero().flatten().tolist() == [3, 7, 8, 20, 30]
    assert not_finite[0].nonzero().flatten().tolist() == [30]


def test_the_canary_bites(tmp_path):
    assert "kv-changed in page" in canary.fire(tmp_path, torch.device("cuda"))
