"""The row-wise kernels, run by Triton's interpreter, and their references, against float64.

The same on a GPU: tests/gpu/test_paths_gpu.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import DTYPES, EPS, WIDTHS, close, draw, gelu, normed

from g4debug.fixes.paths.kernels import gelu_mul, rmsnorm_add, triple_rmsnorm
from g4debug.fixes.paths.kernels._rows import Cut
from g4debug.fixes.paths.kernels.gelu_mul import Tile

pytestmark = [
    pytest.mark.once("Triton is the same with all releases, and the kernels are ours"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernels are compiled here: tests/gpu runs them"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
CUTS = [None, Cut(4), Cut(4, per_sm=1, stages=2), Cut(4, pdl=True)]


def test_the_interpreter_really_runs_the_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    for kernel in (
        rmsnorm_add._rmsnorm_add_kernel,
        gelu_mul._gelu_mul_kernel,
        triple_rmsnorm._triple_rmsnorm_kernel,
    ):
        assert isinstance(kernel, InterpretedFunction)


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rmsnorm_add(dtype, width, how):
    x, r = (draw(n, 5, width, dtype=dtype) for n in "xr")
    w, s = draw("w", width, dtype=dtype), draw("s", 1, dtype=dtype)
    right = normed(x, w, EPS) + r.double()
    close(rmsnorm_add.rmsnorm_add(x, w, r, EPS, how=how), right)
    close(rmsnorm_add.rmsnorm_add(x, w, r, EPS, s, how), right * s.double())


@pytest.mark.parametrize("how", CUTS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triple_rmsnorm(dtype, width, how):
    x, r = (draw(n, 5, width, dtype=dtype) for n in "xr")
    weights = [draw(n, width, dtype=dtype) for n in "xdre"]
    before = r.clone()
    out = triple_rmsnorm.triple_rmsnorm(x, r, *weights, EPS, 1e-5, how)
    close(out.residual, normed(x, weights[0], EPS) + r.double())
    for name, w in zip(("dense", "router", "experts"), weights[1:], strict=True):
        close(getattr(out, name), normed(out.residual, w, 1e-5))
    assert torch.equal(r, before)  # SGLang's own writes into it
    assert len({t.data_ptr() for t in (*out, x, r)}) == 6


@pytest.mark.parametrize("how", [None, Tile(1, 1), Tile(4, 4)], ids=str)
@pytest.mark.parametrize("width", [16, 100, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype, width, how):
    gate = draw("g", 5, width, dtype=dtype)
    layers = draw("p", 5, 3, width, dtype=dtype)  # a layer's input is a slice of all layers'
    close(gelu_mul.gelu_mul(gate, layers[:, 1], how), gelu(gate) * layers[:, 1].double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_far_out(dtype):
    gate = torch.tensor([[-30.0, -9.0, -5.5, -0.0, 0.0, 5.5, 200.0, math.nan]]).to(dtype)
    got = gelu_mul.gelu_mul(gate, torch.ones_like(gate))
    least = 2**-24 if dtype == torch.float16 else 1e-12
    torch.testing.assert_close(got.double(), gelu(gate), rtol=1e-2, atol=least, equal_nan=True)


def test_a_row_of_zeros_and_one_with_a_nan():
    x = torch.zeros(3, 64)
    x[1, 7] = math.nan
    r, w = draw("r", 3, 64, dtype=torch.float32), torch.ones(64)
    out = rmsnorm_add.rmsnorm_add(x, w, r, EPS)
    assert torch.equal(out[0], r[0])
    assert torch.equal(out[2], r[2])
    assert out[1].isnan().all()
    three = triple_rmsnorm.triple_rmsnorm(x, r, w, w, w, w, EPS, EPS)
    assert all(t[1].isnan().all() and not t[0].isnan().any() for t in three)


def test_no_rows():
    x, w = torch.zeros(0, 64), torch.ones(64)
    assert rmsnorm_add.rmsnorm_add(x, w, x, EPS).shape == (0, 64)
    assert gelu_mul.gelu_mul(x, x).shape == (0, 64)
    assert [t.shape for t in triple_rmsnorm.triple_rmsnorm(x, x, w, w, w, w, EPS, EPS)] == [
        (0, 64)
    ] * 4


def test_rows_that_lie_apart():
    wide = draw("wide", 5, 200, dtype=torch.float32)
    x, r, w = wide[:, 20:84], wide[:, 100:164], torch.ones(64)
    close(rmsnorm_add.rmsnorm_add(x, w, r, EPS), normed(x, w, EPS) + r.double())
    out = triple_rmsnorm.triple_rmsnorm(x, r, w, w, w, w, EPS, EPS)
    close(out.residual, normed(x, w, EPS) + r.double())


def test_a_wrong_shape_is_said():
    x = torch.zeros(4, 64)
    with pytest.raises(ValueError, match=r"residual: got shape \(3, 64\).*expected \(4, 64\)"):
        rmsnorm_add.rmsnorm_add(x, torch.ones(64), x[:3], EPS)
    with pytest.raises(ValueError, match=r"x: got torch\.float64"):
        gelu_mul.gelu_mul(x, x.double())
