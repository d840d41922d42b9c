"""The router's kernel, run by Triton's interpreter, and its torch reference, against plain floats.

The same on a GPU, with SGLang's own path beside it: tests/gpu/test_paths_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from router_cases import DTYPES, SHAPES, SPECIAL, check, logits, scale

from g4debug.fixes.paths.kernels import fused_router
from g4debug.fixes.paths.kernels.fused_router import Tile

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernel is compiled here: tests/gpu runs it"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def both(x: torch.Tensor, s: torch.Tensor, top_k: int, how: Tile | None = None) -> None:
    check(x, s, *fused_router.fused_router(x, s, top_k, how))
    check(x, s, *fused_router.reference(x, s, top_k))


def test_the_interpreter_really_runs_the_kernel():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(fused_router._fused_router_kernel, InterpretedFunction)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype(shape, dtype):
    both(logits(shape, dtype), scale(shape[1], dtype), shape[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_ties_and_what_is_no_number(name, dtype):
    x = torch.tensor([SPECIAL[name]]).to(dtype)
    for top_k in (1, 4, 12):
        both(x, scale(12), top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_top_k_up_to_all_experts(dtype):
    x = logits((2, 11, 0), dtype, ties=True)
    for top_k in range(1, 12):
        both(x, scale(11), top_k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_ties(dtype):
    both(logits((9, 128, 8), dtype, ties=True), scale(128), 8)


@pytest.mark.parametrize("how", [Tile(1, 1), Tile(4, 4), Tile(8, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_every_tile_and_a_last_one_that_is_not_full(rows, how):
    both(logits((rows, 20, 5), torch.bfloat16), scale(20), 5, how)


def test_rows_that_lie_apart():
    wide = logits((6, 40, 3), torch.bfloat16)
    both(wide[:, 8:28], scale(20), 3)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.floats(width=16, allow_subnormal=True), min_size=1, max_size=24),
    st.integers(1, 24),
    st.sampled_from(DTYPES),
)
def test_any_row(values, top_k, dtype):
    x = torch.tensor([values]).to(dtype)
    both(x, scale(len(values)), min(top_k, len(values)))


def test_sglangs_torch_path_chooses_the_same_where_nothing_ties():
    from torch.nn.functional import softmax

    order = torch.Generator().manual_seed(1)
    x = torch.stack([torch.randperm(64, generator=order) for _ in range(9)]).float() / 8
    values, ids = torch.topk(x, k=8, dim=-1)
    weights, ours = fused_router.fused_router(x, scale(64), 8)
    assert torch.equal(ours.long(), ids)
    torch.testing.assert_close(weights, softmax(values, -1) * scale(64)[ids])


@pytest.mark.parametrize(
    ("x", "experts", "top_k", "words"),
    [
        (torch.zeros(2, 8), 8, 9, "got top 9 of 8 experts"),
        (torch.zeros(2, 8), 8, 0, "got top 0 of 8 experts"),
        (torch.zeros(2, 2000), 2000, 8, "experts <= 1024"),
        (torch.zeros(2, 8, dtype=torch.float64), 8, 2, "torch.float64"),
        (torch.zeros(8), 8, 2, "expected two dimensions"),
        (torch.zeros(8, 8).T, 8, 2, "adjacent columns"),
        (torch.zeros(2, 8), 9, 2, "got a scale of shape"),
    ],
)
def test_what_it_does_not_take_is_said(x, experts, top_k, words):
    with pytest.raises(ValueError, match=words):
        fused_router.fused_router(x, scale(experts), top_k)
