"""The work between the QKV GEMM of the vision tower and its attention, in one launch.

For each head of each token, in float32 and rounded once at the end::

    v:    n = norm(clamp(x))                      norm(t) = t * rsqrt(mean(t^2) + eps)
    q, k: n = norm(clamp(x)) * weight
          n * cos + rotate_half(n) * sin          in each half of the head by itself

One half of a head is rotated by the patch's x and the other by its y (2-D RoPE, as in Hugging
Face's vision tower of Gemma4). With the quarters a, b, c, d of a head, rotate_half within the
halves is (-b, a, -d, c). So a program holds the quarters (a, c) in one tile and (b, d) in another,
and reads each number once. SGLang 0.5.12 launches some 28 kernels for this, and rounds after each.
The bounds of the three projections are read on the device, so that a weight update takes effect.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from g4debug.fixes.paths.kernels._rows import Bounds, Cut, clipped, in_turn, needs_rows, options


class Heads(NamedTuple):
    """The inputs of attention: q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@triton.jit
def _quarters(ptr, at, inside, D: tl.constexpr):
    """The first and the second quarter of each half of a head."""
    first = tl.load(ptr + at, mask=inside, other=0.0)
    return first, tl.load(ptr + at + D // 4, mask=inside, other=0.0)


@triton.jit
def _normed(a, b, inside, low_ptr, high_ptr, eps, D: tl.constexpr):
    # A lower bound above 0 also lifts what is masked.
    a = tl.where(inside, clipped(a, low_ptr, high_ptr), 0.0)
    b = tl.where(inside, clipped(b, low_ptr, high_ptr), 0.0)
    squares = tl.sum(tl.sum(a * a + b * b, axis=2), axis=1)
    rstd = tl.rsqrt(squares / D + eps)[:, None, None]
    return a * rstd, b * rstd


@triton.jit
def _turned(a, b, w_ptr, part, quarter, cos_a, cos_b, sin_a, sin_b, D: tl.constexpr):
    w_a, w_b = _quarters(w_ptr, part, quarter, D)
    a *= w_a.to(tl.float32)
    b *= w_b.to(tl.float32)
    return a * cos_a - b * sin_a, b * cos_b + a * sin_b


@triton.jit
def _keep(ptr, at, inside, a, b, D: tl.constexpr):
    tl.store(ptr + at, a.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + at + D // 4, b.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _vision_qkv_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_low_ptr,
    q_high_ptr,
    k_low_ptr,
    k_high_ptr,
    v_low_ptr,
    v_high_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    stride,
    stride_cos,
    stride_sin,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * stride
    col = tl.arange(0, BLOCK)[None, None, :]
    part = tl.arange(0, 2)[None, :, None] * (D // 2) + col  # of a head: [1, half, column]
    quarter = col < D // 4
    head = tl.arange(0, BLOCK_HEADS)[:, None, None]
    q_at, q_inside = head * D + part, (head < HEADS) & quarter
    kv_head = tl.arange(0, BLOCK_KV_HEADS)[:, None, None]
    kv_at, kv_inside = kv_head * D + part, (kv_head < KV_HEADS) & quarter

    # All loads before the first store, which the compiler does not move them across.
    q_a, q_b = _quarters(x_ptr, q_at, q_inside, D)
    k_a, k_b = _quarters(x_ptr + HEADS * D, kv_at, kv_inside, D)
    v_a, v_b = _quarters(x_ptr + (HEADS + KV_HEADS) * D, kv_at, kv_inside, D)
    cos_a, cos_b = _quarters(cos_ptr + token * stride_cos, part, quarter, D)
    sin_a, sin_b = _quarters(sin_ptr + token * stride_sin, part, quarter, D)
    cos_a, cos_b = cos_a.to(tl.float32), cos_b.to(tl.float32)
    sin_a, sin_b = sin_a.to(tl.float32), sin_b.to(tl.float32)

    q_a, q_b = _normed(q_a, q_b, q_inside, q_low_ptr, q_high_ptr, eps, D)
    k_a, k_b = _normed(k_a, k_b, kv_inside, k_low_ptr, k_high_ptr, eps, D)
    v_a, v_b = _normed(v_a, v_b, kv_inside, v_low_ptr, v_high_ptr, eps, D)
    q_a, q_b = _turned(q_a, q_b, q_weight_ptr, part, quarter, cos_a, cos_b, sin_a, sin_b, D)
    k_a, k_b = _turned(k_a, k_b, k_weight_ptr, part, quarter, cos_a, cos_b, sin_a, sin_b, D)
    _keep(q_ptr + token * HEADS * D, q_at, q_inside, q_a, q_b, D)
    _keep(k_ptr + token * KV_HEADS * D, kv_at, kv_inside, k_a, k_b, D)
    _keep(v_ptr + token * KV_HEADS * D, kv_at, kv_inside, v_a, v_b, D)


def cut(head_dim: int) -> Cut:
    """One program for each token, because its heads share a row of cos and of sin. This is the
    fastest on a H200 for six pictures. ``benchmarks/vision_layer.py --tune`` tries the others."""
    return Cut(1 if head_dim <= 64 else 2, pdl=True)


def vision_qkv(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    q: Bounds,
    k: Bounds,
    v: Bounds,
    how: Cut | None = None,
) -> Heads:
    """The heads, clipped, normed and rotated, as new contiguous tensors of qkv's dtype.

    qkv: [tokens, (heads + 2 kv_heads) * head_dim], first q, then k, then v. cos, sin:
    [tokens, head_dim]. All are float16, bfloat16 or float32, with adjacent columns and any row
    stride. q_weight, k_weight: [head_dim]. q, k, v: the bounds of each. Raises ValueError for other
    shapes.
    """
    tokens, head_dim = cos.shape
    needs_rows(qkv, "qkv", tokens, (heads + 2 * kv_heads) * head_dim)
    needs_rows(cos, "cos", tokens, head_dim)
    needs_rows(sin, "sin", tokens, head_dim)
    if head_dim % 4:
        raise ValueError(f"cos: got head_dim {head_dim}, expected a multiple of 4")
    made = Heads(*(qkv.new_empty((tokens, n, head_dim)) for n in (heads, kv_heads, kv_heads)))
    if tokens == 0:
        return made
    how = how or cut(head_dim)
    if how.per_sm:
        raise ValueError(f"how: got {how}, expected one program for each token: per_sm=0")
    _vision_qkv_kernel[(tokens,)](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        *q,
        *k,
        *v,
        *made,
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_KV_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK=triton.next_power_of_2(head_dim // 4),
        **options(how, qkv.device),
    )
    return made


def reference(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    q: Bounds,
    k: Bounds,
    v: Bounds,
) -> Heads:
    """The same computation in torch."""
    head_dim = cos.shape[1]
    split = torch.split(qkv, [n * head_dim for n in (heads, kv_heads, kv_heads)], dim=-1)
    found = []
    for part, bounds, weight in zip(split, (q, k, v), (q_weight, k_weight, None), strict=True):
        x = torch.clamp(part, *bounds).float().reshape(len(part), -1, head_dim)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if weight is not None:
            x = x * weight.float()
            a, b, c, d = x.chunk(4, dim=-1)
            turned = torch.cat([-b, a, -d, c], dim=-1)
            x = x * cos.float()[:, None] + turned * sin.float()[:, None]
        found.append(x.to(qkv.dtype))
    return Heads(*found)
