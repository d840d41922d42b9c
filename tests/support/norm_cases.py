"""Inputs of the row-wise kernels, and what they must give, in float64."""

from __future__ import annotations

import math

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDTHS = (64, 100, 1536)  # a toy's, no power of two, E2B's
EPS = 1e-6
# One rounding to the dtype: half a unit in the last place. Triton's interpreter cuts float32 off to
# bfloat16, where a GPU rounds to nearest: a whole unit. A GPU's rsqrt, exp and division are good
# to a few units of float32, of terms of size 50 that may cancel.
GPU = torch.cuda.is_available()
ROUNDING = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8 if GPU else 2**-7,
    torch.float32: 1e-5 if GPU else 2e-6,
}
CANCELLED = 1e-4 if GPU else 3e-6


def draw(name: str, *shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + sum(shape))
    return (torch.randn(*shape, generator=generator) * 2).to(device, dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def gelu(g: torch.Tensor) -> torch.Tensor:
    g = g.double()
    return g * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    """Equal to ``right`` (float64) but for one rounding, and float32 sums before it."""
    rtol = ROUNDING[got.dtype] * 1.01
    torch.testing.assert_close(got.double(), right, rtol=rtol, atol=CANCELLED, equal_nan=True)
