"""hopper-extend-blocks: which blocks SGLang's kernel gets, and that they change no bit."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from real_triton import sglangs

from g4debug.fixes.base import state_of

pytestmark = pytest.mark.written_for("hopper-extend-blocks")
MODULE = "sglang.srt.layers.attention.triton_ops.extend_attention"
ON = {"G4DEBUG_FIX_HOPPER_EXTEND_BLOCKS": "1"}
HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


def queries(monkeypatch, chip: tuple[int, int], head_dim: int) -> int:
    """How many queries SGLang's own function gives a block of its kernel on a chip."""
    kernel = importlib.import_module(MODULE)
    monkeypatch.setattr(kernel, "_is_cuda", True)
    monkeypatch.setattr(kernel, "CUDA_CAPABILITY", chip, raising=False)
    return kernel._get_block_sizes_for_extend_attention(head_dim, head_dim)[3]


@pytest.mark.parametrize("on", [False, True])
def test_only_on_hopper_and_only_with_such_a_head_dim(arm, monkeypatch, on):
    arm(**(ON if on else {}))
    assert state_of("hopper-extend-blocks") == ("applied" if on else "off")
    assert queries(monkeypatch, HOPPER, 256) == (64 if on else 128)
    assert queries(monkeypatch, HOPPER, 192) == (64 if on else 128)
    assert queries(monkeypatch, HOPPER, 128) == 128
    assert queries(monkeypatch, HOPPER, 512) == 32
    assert queries(monkeypatch, BLACKWELL, 256) == 64
    assert queries(monkeypatch, AMPERE, 128) == 128


def test_a_cpu_is_left_alone(arm):
    arm(**ON)
    kernel = importlib.import_module(MODULE)
    assert not kernel._is_cuda
    assert kernel._get_block_sizes_for_extend_attention(256, 256)[3] == 32


@pytest.mark.usefixtures("sglang")
def test_the_smaller_blocks_change_no_bit(monkeypatch):
    """SGLang's kernel in Triton's interpreter, with more queries than either block has."""
    # The interpreter multiplies by numpy.matmul, and BLAS may sum a row in another order if the
    # block has another height, as it does on some processors. einsum does not.
    monkeypatch.setattr("numpy.matmul", lambda a, b, **_: np.einsum("ij,jk->ik", a, b))
    extend = sglangs("extend_attention_fwd")
    prefixes, new, dim = [70, 0, 9], [140, 4, 1], 256
    tokens, slots = sum(new), 96

    def normal(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    q, k, v = (normal(tokens, h, dim, seed=h) for h in (2, 1, 1))
    pool = [normal(slots, 1, dim, seed=s) for s in (6, 7)]
    begins = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indptr = torch.tensor([0, *prefixes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.randperm(slots, generator=torch.Generator().manual_seed(1))[: sum(prefixes)]
    found = []
    for block in (128, 64):
        sizes = (256, 0, 256, block, 64, 8)
        extend.__globals__["_get_block_sizes_for_extend_attention"] = lambda *_, s=sizes: s
        o = torch.full_like(q, 7.0)
        extend(
            q, k, v, o, *pool, begins, indptr, indices, None, True, None, max(new), 1.0, 1.0,
            0.0625,
        )  # fmt: skip
        found.append(o)
    assert not torch.equal(found[0], torch.full_like(q, 7.0))
    assert torch.equal(*found)
