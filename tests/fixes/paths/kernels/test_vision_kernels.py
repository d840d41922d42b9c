"""The vision tower's kernels, run by Triton's interpreter, and their references, against float64.

The same on a GPU: tests/gpu/test_vision_gpu.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import DTYPES, EPS, draw
from vision_cases import BOUNDS, INF, SHAPES, bounds, check_gelu, check_norm_add, check_qkv

from g4debug.fixes.paths.kernels import clipped_gelu_mul, clipped_norm_add, vision_qkv
from g4debug.fixes.paths.kernels._rows import Cut, Tile
from g4debug.fixes.paths.kernels.clipped_norm_add import Next

pytestmark = [
    pytest.mark.once("Triton is the same with all releases, and the kernels are ours"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernels are compiled here: tests/gpu runs them"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
FREE = bounds(-INF, INF)
TILES = [None, Tile(1, 1), Tile(4, 4), Tile(2, 2, True)]


def test_the_interpreter_really_runs_the_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    for kernel in (
        vision_qkv._vision_qkv_kernel,
        clipped_gelu_mul._clipped_gelu_mul_kernel,
        clipped_norm_add._clipped_norm_add_kernel,
    ):
        assert isinstance(kernel, InterpretedFunction)


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv(dtype, shape, name):
    check_qkv(shape, dtype, name)


def test_qkv_of_one_token_of_rows_that_lie_apart_and_of_other_cuts():
    check_qkv((1, 2, 1, 16), torch.float32, "finite")
    check_qkv((3, 2, 1, 16), torch.float32, "finite", apart=True)
    check_qkv((3, 2, 1, 16), torch.float32, "finite", how=Cut(8, pdl=True))


@pytest.mark.parametrize("how", TILES, ids=str)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype, name, how):
    check_gelu(5, 100, dtype, name, how=how)


@pytest.mark.parametrize("columns", [1, 64, 1024, 1025, 4304])
def test_gelu_mul_of_every_width(columns):
    """A row is cut into programs of 1024 columns."""
    check_gelu(3, columns, torch.float32, "finite")
    check_gelu(3, columns, torch.float32, "finite", apart=7)


@pytest.mark.parametrize("how", TILES, ids=str)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_add(dtype, name, how):
    check_norm_add(5, 100, dtype, name, how=how)


@pytest.mark.parametrize("columns", [64, 768, 1152])
def test_norm_add_of_every_width(columns):
    check_norm_add(1, columns, torch.float32, "finite")
    check_norm_add(3, columns, torch.float32, "above and below 0", apart=7)


def test_nothing_gives_nothing():
    none = torch.zeros(0, 48)
    heads = vision_qkv.vision_qkv(
        none, 1, 1, none[:, :16], none[:, :16], *[torch.ones(16)] * 2, EPS, FREE, FREE, FREE
    )
    assert [t.shape for t in heads] == [(0, 1, 16)] * 3
    assert clipped_gelu_mul.clipped_gelu_mul(none, FREE, FREE, FREE).shape == (0, 24)
    one = torch.ones(48)
    out, after = clipped_norm_add.clipped_norm_add(none, FREE, one, none, EPS)
    assert out.shape == (0, 48)
    assert after is None
    following = Next(one, EPS, FREE)
    _, after = clipped_norm_add.clipped_norm_add(none, FREE, one, none, EPS, None, following)
    assert after.shape == (0, 48)


@pytest.mark.parametrize("pair", [(-INF, INF), (-1.0, 1.0)], ids=str)
def test_a_nan_stays_a_nan_where_it_is(pair):
    """As torch.clamp has it; a clamp by fmin and fmax would make a bound of it."""
    given = bounds(*pair)
    qkv = draw("n", 2, 2 * 48, dtype=torch.float32)
    qkv[1, 16 + 3] = math.nan  # the second q head of token 1
    cos, sin, w = torch.ones(2, 16), torch.zeros(2, 16), torch.ones(16)
    q, k, v = vision_qkv.vision_qkv(qkv, 2, 2, cos, sin, w, w, EPS, given, given, given)
    assert q[1, 1].isnan().all()
    assert not any(t.isnan().any() for t in (q[0], q[1, 0], k, v))

    both = draw("n", 2, 32, dtype=torch.float32)
    both[0, 3] = both[1, 16 + 5] = math.nan
    out = clipped_gelu_mul.clipped_gelu_mul(both, given, given, given)
    assert out.isnan().nonzero().tolist() == [[0, 3], [1, 5]]

    x = draw("n", 3, 16, dtype=torch.float32)
    x[1, 2] = math.nan
    r = torch.zeros(3, 16)
    r[2, 4] = math.nan  # of one number only; all that follow are a norm of the row
    for out in clipped_norm_add.clipped_norm_add(x, given, w, r, EPS, None, Next(w, EPS, given)):
        assert not out[0].isnan().any()
        assert out[1].isnan().all()
    assert out[2].isnan().all()


def test_infinite_numbers_meet_their_bounds():
    both = torch.tensor([[INF, 2.0, 1.0, -INF]])
    out = clipped_gelu_mul.clipped_gelu_mul(both, bounds(-4.0, 4.0), bounds(-3.0, 3.0), FREE)
    right = torch.nn.functional.gelu(torch.tensor([[4.0, 2.0]]), approximate="tanh")
    torch.testing.assert_close(out, right * torch.tensor([[1.0, -3.0]]))


def test_a_bound_of_more_digits_is_rounded_to_the_input_as_torch_does():
    """With float16, which the interpreter rounds rightly."""
    x = torch.full((1, 8), 5.0, dtype=torch.float16)
    given = bounds(-1.0, 0.3)
    got = clipped_gelu_mul.clipped_gelu_mul(x, FREE, FREE, given)
    assert torch.equal(got, torch.clamp(x[:, :4], *given))
    assert float(got[0, 0]) != pytest.approx(0.3, abs=1e-7)


def test_bounds_are_read_at_each_launch():
    given = bounds(-INF, INF)
    both = draw("b", 1, 8, dtype=torch.float32).abs() + 1
    before = clipped_gelu_mul.clipped_gelu_mul(both, FREE, FREE, given)
    given[1].fill_(0.25)
    after = clipped_gelu_mul.clipped_gelu_mul(both, FREE, FREE, given)
    assert torch.equal(after, before.clamp(max=0.25))


def test_a_wrong_shape_is_said():
    x, w = torch.zeros(4, 48), torch.ones(16)
    cos = torch.zeros(4, 16)
    with pytest.raises(ValueError, match=r"qkv: got shape \(4, 48\).*expected \(4, 64\)"):
        vision_qkv.vision_qkv(x, 2, 1, cos, cos, w, w, EPS, FREE, FREE, FREE)
    with pytest.raises(ValueError, match=r"sin: got shape \(3, 16\).*expected \(4, 16\)"):
        vision_qkv.vision_qkv(x, 1, 1, cos, cos[:3], w, w, EPS, FREE, FREE, FREE)
    odd = torch.zeros(4, 18)
    with pytest.raises(ValueError, match="got head_dim 6, expected a multiple of 4"):
        vision_qkv.vision_qkv(odd, 1, 1, odd[:, :6], odd[:, :6], w, w, EPS, FREE, FREE, FREE)
    with pytest.raises(ValueError, match="expected one program for each token"):
        vision_qkv.vision_qkv(x, 1, 1, cos, cos, w, w, EPS, FREE, FREE, FREE, Cut(4, per_sm=1))
    with pytest.raises(ValueError, match="both: got 17 columns"):
        clipped_gelu_mul.clipped_gelu_mul(odd[:, :17], FREE, FREE, FREE)
    with pytest.raises(ValueError, match=r"residual: got shape \(3, 18\)"):
        clipped_norm_add.clipped_norm_add(odd, FREE, w, odd[:3], EPS)
    with pytest.raises(ValueError, match=r"x: got torch\.float64"):
        clipped_norm_add.clipped_norm_add(odd.double(), FREE, w, odd, EPS)
