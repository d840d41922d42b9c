"""KV-shared layers on triton read the KV of new tokens back from where it was written.

So a location that a pool does not have is not only written to, but also read. On a GPU, that is a
device-side assert of torch's index kernel, after which nothing works any more.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from real_backend import LAYERS, PAGE
from real_triton import WIDE, TritonRig
from writing import ARMED, Writing, put

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]


class Sharing(Writing):
    """The layers write their KV; then a layer without K and V reads the KV of ``like``."""

    rig_class = TritonRig

    def write(self, batch, layers=None):
        new = len(batch.out_cache_loc)
        torch.manual_seed(0)
        for layer in self.rig.layers:
            q, kv = torch.zeros(new, layer.tp_q_head_num * WIDE), torch.randn(new, 1, WIDE)
            self.backend.forward(q, kv, kv, layer, batch)
        # Layers that have no KV of their own have the number of the one that they share with.
        q = torch.zeros(new, self.like.tp_q_head_num * WIDE)
        self.seen = self.backend.forward(q, None, None, self.like, batch)
        return batch


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("mode", ["log", "contain"])
def test_a_shared_layer_reads_back_what_was_written(arm, sliding, mode):
    arm(**ARMED, G4DEBUG_MODE=mode)
    it = Sharing()
    it.like = next(x for x in it.rig.layers if LAYERS[x.layer_id] == sliding)
    slots = it.rig.allocator.size_full + PAGE

    def spoil(batch):
        put(3, slots)(batch)
        metadata = it.backend.forward_metadata
        if getattr(metadata, "swa_out_cache_loc", None) is not None:
            metadata.swa_out_cache_loc[3] = slots

    before = it.forward("extend").out_cache_loc
    sound = it.seen
    if mode == "log":  # it is only told
        with pytest.raises(IndexError):
            it.forward("extend", spoil)
        return
    batch = it.forward("extend", spoil)
    assert torch.equal(it.seen, sound)
    # SGLang's own tensors are as they were: the pages are given back by them.
    assert batch.out_cache_loc[3] == slots
    batch.out_cache_loc[3] = before[3]
    assert torch.equal(batch.out_cache_loc, before)
