"""Inputs of the vision tower's kernels, and what they must give, in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
from norm_cases import EPS, close, draw, gelu, normed

from g4debug.fixes.paths.kernels import clipped_gelu_mul, clipped_norm_add, vision_qkv

# tokens, heads, kv_heads, head_dim: a toy's, E2B's, 26B-A4B's, no power of two with grouped heads
SHAPES = ((5, 2, 2, 16), (2, 12, 12, 64), (2, 16, 16, 72), (3, 3, 1, 72))
INF = math.inf
# All are numbers of every dtype. One that is above 0 lifts padding lanes unless they are masked.
BOUNDS = {
    "no bounds": ((-INF, INF),) * 3,
    "finite": ((-1.5, 1.25), (-0.75, 2.0), (-2.0, 0.5)),
    "above and below 0": ((0.5, 3.0), (-INF, -0.25), (0.25, INF)),
    "all the same": ((0.5, 0.5), (2.0, -2.0), (0.0, 0.0)),  # low above high: high, says torch
}


def bounds(low: float, high: float, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(low, device=device), torch.tensor(high, device=device)


def clamp(x: torch.Tensor, pair: tuple[float, float]) -> torch.Tensor:
    """Of float64. torch's own, on numbers; a NaN stays one."""
    return torch.minimum(torch.maximum(x, x.new_tensor(pair[0])), x.new_tensor(pair[1]))


def angles(
    tokens: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each column its own, where SGLang repeats a quarter."""
    angle = draw("angle", tokens, head_dim, dtype=torch.float32, device=device) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def check_qkv(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    name: str = "no bounds",
    device: str = "cpu",
    how: Any = None,
    apart: bool = False,
) -> None:
    """The kernel and its reference against float64. apart: rows are slices of wider ones."""
    tokens, heads, kv_heads, d = shape
    width = (heads + 2 * kv_heads) * d
    x = draw("qkv", tokens, width + 24 * apart, dtype=dtype, device=device)[:, :width]
    cos, sin = (t[:, :d] for t in angles(tokens, d + 8 * apart, dtype, device))
    weights = [draw(n, d, dtype=dtype, device=device) for n in "qk"]
    pairs = BOUNDS[name]
    given = [bounds(*pair, device) for pair in pairs]
    split = x.double().split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
    right = []
    for part, pair, weight in zip(split, pairs, [*weights, None], strict=True):
        head = clamp(part, pair).unflatten(-1, (-1, d))
        one = torch.ones(d, device=device)
        head = normed(head, one if weight is None else weight, EPS)
        right.append(head if weight is None else rotated(head, cos.double(), sin.double()))
    for function, more in ((vision_qkv.vision_qkv, (how,)), (vision_qkv.reference, ())):
        found = function(x, heads, kv_heads, cos, sin, *weights, EPS, *given, *more)
        for got, want in zip(found, right, strict=True):
            assert got.is_contiguous()
            close(got, want)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, d]. Column by column, as the pairs of a rotation are defined."""
    d = x.shape[-1]
    out = torch.empty_like(x)
    for half in (0, d // 2):
        for i in range(half, half + d // 4):
            j = i + d // 4
            a, b = x[..., i], x[..., j]
            out[..., i] = a * cos[:, None, i] - b * sin[:, None, i]
            out[..., j] = b * cos[:, None, j] + a * sin[:, None, j]
    return out


def check_gelu(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    name: str = "no bounds",
    device: str = "cpu",
    how: Any = None,
    apart: int = 0,
) -> None:
    """apart: columns between two rows that are not theirs."""
    both = draw("both", rows, 2 * columns + apart, dtype=dtype, device=device)[:, : 2 * columns]
    pairs = BOUNDS[name]
    given = [bounds(*pair, device) for pair in pairs]
    gate, up = both.double().chunk(2, dim=-1)
    right = clamp(gelu(clamp(gate, pairs[0])) * clamp(up, pairs[1]), pairs[2])
    close(clipped_gelu_mul.clipped_gelu_mul(both, *given, how), right)
    close(clipped_gelu_mul.reference(both, *given), right)


def check_norm_add(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    name: str = "no bounds",
    device: str = "cpu",
    how: Any = None,
    apart: int = 0,
) -> None:
    """With and without scalar and what follows. apart: see check_gelu."""
    x, r = (draw(n, rows, columns + apart, dtype=dtype, device=device)[:, :columns] for n in "xr")
    w, w_next = (draw(n, columns, dtype=dtype, device=device) for n in ("w", "next"))
    s = torch.tensor(0.75, device=device)
    first, second, _ = BOUNDS[name]
    given = bounds(*first, device)
    following = clipped_norm_add.Next(w_next, 1e-5, bounds(*second, device))
    right = normed(clamp(x.double(), first), w, EPS) + r.double()
    for scalar in (None, s):
        for after in (None, following):
            arguments = (x, given, w, r, EPS, scalar, after)
            for out, next_ in (
                clipped_norm_add.clipped_norm_add(*arguments, how),
                clipped_norm_add.reference(*arguments),
            ):
                close(out, right if scalar is None else right * 0.75)
                assert (next_ is None) == (after is None)
                if next_ is not None:
                    close(next_, clamp(normed(out, w_next, 1e-5), second))
