"""Llama-4's rotation on a CPU, with SGLang's own class and in views, as the model calls it."""

from __future__ import annotations

import pytest
import torch

from g4debug.cpu import irope

pytestmark = pytest.mark.once("the toys are served on the newest release only")
HEADS, KV_HEADS, DIM = 4, 2, 32


@pytest.fixture
def rotation(sglang):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding(DIM, DIM, 4096, 10_000, True, torch.float32)


def views() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    qk = torch.randn(5, (HEADS + KV_HEADS) * DIM, generator=torch.Generator().manual_seed(1))
    return qk, *qk.split([HEADS * DIM, KV_HEADS * DIM], dim=-1)


def test_it_is_written_where_the_model_goes_on_reading(rotation):
    positions = torch.tensor([0, 1, 7, 63, 4000])
    qk, q, k = views()
    whole = qk.clone()
    wanted = torch.cat(rotation.forward_native(positions, q, k), dim=-1)
    assert torch.equal(qk, whole)  # SGLang's own for CPUs leaves its arguments as they were
    rotate = irope.rotations(lambda: rotation.forward_native)()
    results = rotate(positions, q, k)
    assert torch.equal(qk, wanted)
    assert not torch.equal(qk[1:], whole[1:])
    assert [x.data_ptr() for x in results] == [q.data_ptr(), k.data_ptr()]


def test_the_model_asks_for_a_rotation_and_gets_one_of_its_own(rotation):
    rotate = irope.rotations(lambda *given, **named: rotation)
    first, second = rotate(DIM, base=1), rotate(DIM, base=1)
    assert first is not second
    assert first.rotation is second.rotation is rotation
