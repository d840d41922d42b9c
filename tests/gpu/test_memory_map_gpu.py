"""The memory map on a GPU: what PyTorch's segments are for, and when they have changed."""

from __future__ import annotations

import pytest
import torch

from g4debug.findings import memory_map
from g4debug.findings.memory_map import KV, SEGMENT, MemoryRange
from g4debug.tracers.flight_recorder import memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LARGE = 64 << 20  # bytes; a segment of its own


def large() -> torch.Tensor:
    return torch.empty(LARGE, dtype=torch.uint8, device="cuda")


def test_each_segment_says_what_it_is_for():
    kv, weights, other = large(), large(), large()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        private = large().fill_(1)
    known = [MemoryRange(kv.data_ptr(), LARGE, KV, page_bytes=1 << 16, page_size=64)]
    held = [MemoryRange(weights.data_ptr(), LARGE, "weights")]
    found = memory_map.make(memory._segments(known, held), 0, "cuda:0", True)
    told = {}
    for name, tensor in {"kv": kv, "weights": weights, "other": other, "private": private}.items():
        (segment,) = found.at(tensor.data_ptr())
        assert segment.what == SEGMENT
        told[name] = segment.name
    assert told["kv"] == "KV"
    assert told["weights"] == "weights"
    assert told["other"] == "workspace and activations"
    assert "a CUDA graph's private pool" in told["private"]


def test_a_new_segment_is_a_change():
    torch.cuda.empty_cache()  # else it may get a segment that an earlier test left
    before = memory.changed()
    kept = large()
    assert memory.changed() != before
    again = memory.changed()
    kept.fill_(1)
    assert memory.changed() == again
