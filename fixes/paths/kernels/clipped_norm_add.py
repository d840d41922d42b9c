"""Clips and norms a GEMM's output, adds the residual, and makes the input of the next GEMM.

For each row, in float32::

    out  = round((norm(clamp(x)) * weight + residual) * scalar)
    next = round(clamp(norm(out) * next_weight))        norm(t) = t * rsqrt(mean(t^2) + eps)

``next`` is made only if it is asked for. It is computed from the rounded ``out``, which is the
tensor that the layer goes on with. The bounds are read on the device, so that a weight update takes
effect. This is one launch, where SGLang 0.5.12 has up to six in the vision tower, each of which
rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from g4debug.fixes.paths.kernels._rows import (
    Bounds,
    Tile,
    clipped,
    in_turn,
    needs_rows,
    options,
    tile_at,
)


class Next(NamedTuple):
    """The norm before the next GEMM, and the bounds of the GEMM's input. weight: [columns]."""

    weight: torch.Tensor
    eps: float
    bounds: Bounds


@triton.jit
def _normed(x, eps, N: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _clipped_norm_add_kernel(
    x_ptr,
    low_ptr,
    high_ptr,
    w_ptr,
    r_ptr,
    scalar_ptr,
    out_ptr,
    next_w_ptr,
    next_low_ptr,
    next_high_ptr,
    next_ptr,
    rows,
    stride_x,
    stride_r,
    eps,
    next_eps,
    N: tl.constexpr,
    HAS_SCALAR: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    row, cols, inside = tile_at(tl.program_id(0), rows, 0, N, ROWS, BLOCK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0)
    r = tl.load(r_ptr + row * stride_r + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    # A lower bound above 0 also lifts the columns beyond N.
    wide = tl.where(inside, clipped(x, low_ptr, high_ptr), 0.0)
    out = _normed(wide, eps, N) * w + r
    if HAS_SCALAR:
        out *= tl.load(scalar_ptr).to(x.dtype).to(tl.float32)
    stored = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * N + cols, stored, mask=inside)
    if HAS_NEXT:
        next_w = tl.load(next_w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        following = (_normed(stored.to(tl.float32), next_eps, N) * next_w).to(stored.dtype)
        following = clipped(following, next_low_ptr, next_high_ptr).to(stored.dtype)
        tl.store(next_ptr + row * N + cols, following, mask=inside)


def tile(columns: int) -> Tile:
    """The fastest tile on a H200 for six pictures in E2B's tower; 26B-A4B's was not tuned.
    ``benchmarks/vision_layer.py --tune`` tries the others."""
    return Tile(1, 1 if columns <= 1024 else 4, pdl=True)


def clipped_norm_add(
    x: torch.Tensor,
    bounds: Bounds,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    scalar: torch.Tensor | None = None,
    following: Next | None = None,
    how: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``rmsnorm(clamp(x), weight) + residual``, times ``scalar`` if given, and the next input.

    x, residual: [rows, columns], float16, bfloat16 or float32, with adjacent columns and any row
    stride. weight: [columns]. scalar: one element, on the device; it is rounded to x's dtype, as
    torch does. Returns new tensors like x. The second is None without ``following``. Raises
    ValueError for other shapes.
    """
    rows, columns = x.shape
    needs_rows(x, "x", rows, columns)
    needs_rows(residual, "residual", rows, columns)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    after = None if following is None else torch.empty_like(out)
    if rows == 0:
        return out, after
    how = how or tile(columns)
    following = following or Next(weight, eps, bounds)
    _clipped_norm_add_kernel[(triton.cdiv(rows, how.rows),)](
        x,
        *bounds,
        weight,
        residual,
        weight if scalar is None else scalar,
        out,
        following.weight,
        *following.bounds,
        out if after is None else after,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        following.eps,
        N=columns,
        HAS_SCALAR=scalar is not None,
        HAS_NEXT=after is not None,
        ROWS=how.rows,
        BLOCK=triton.next_power_of_2(columns),
        **options(how, x.device),
    )
    return out, after


def reference(
    x: torch.Tensor,
    bounds: Bounds,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    scalar: torch.Tensor | None = None,
    following: Next | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same computation in torch."""

    def norm(t: torch.Tensor, w: torch.Tensor, e: float) -> torch.Tensor:
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + e) * w.float()

    out = norm(torch.clamp(x, *bounds).float(), weight, eps) + residual.float()
    out = (out if scalar is None else out * scalar.to(x.dtype).float()).to(x.dtype)
    if following is None:
        return out, None
    after = norm(out.float(), following.weight, following.eps).to(x.dtype)
    return out, torch.clamp(after, *following.bounds)
