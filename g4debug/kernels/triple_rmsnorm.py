"""The norms between attention and a mixture of experts, in one launch.

For each row, in float32::

    residual'    = round(x * rsqrt(mean(x^2) + eps_x) * w_x + residual)
    n            = residual' * rsqrt(mean(residual'^2) + eps)
    dense, router, experts = n * w_dense, n * w_router, n * w_experts

x is the output of attention. ``residual'`` is rounded to its dtype before it is normed: all three
inputs are norms of the very tensor that the layer carries on. x and residual are read once, each
of the four outputs is written once. That the three norms share one sum of squares is what vLLM's
Inductor found for this layer (its ``triton_red_fused_add_moe_forward_mul_rms_norm_0``), says seed
PR #18.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from g4debug.kernels._rows import (
    Cut,
    for_graphs,
    load_part,
    needs_rows,
    options,
    store_part,
)


class Normed(NamedTuple):
    """Each [rows, columns], of x's dtype."""

    residual: torch.Tensor
    dense: torch.Tensor
    router: torch.Tensor
    experts: torch.Tensor


@triton.jit
def _outs(
    res, rstd, dense_ptr, router_ptr, experts_ptr, wd, wr, we, cols,
    N: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    n = res * rstd
    store_part(dense_ptr, cols, n * wd, N, END)
    store_part(router_ptr, cols, n * wr, N, END)
    store_part(experts_ptr, cols, n * we, N, END)


@triton.jit
def _row(
    x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr,
    wxa, wda, wra, wea, wxb, wdb, wrb, web, row, stride_x, stride_r, eps_x, eps, a, b,
    N: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    x_ptr += row * stride_x
    r_ptr += row * stride_r
    res_ptr += row * N
    dense_ptr += row * N
    router_ptr += row * N
    experts_ptr += row * N
    xa, ra = load_part(x_ptr, a, N, A), load_part(r_ptr, a, N, A)
    square = tl.sum(xa * xa, axis=0)
    if B > 0:
        xb, rb = load_part(x_ptr, b, N, A + B), load_part(r_ptr, b, N, A + B)
        square += tl.sum(xb * xb, axis=0)
    rstd = tl.rsqrt(square / N + eps_x)
    kept = (xa * rstd * wxa + ra).to(res_ptr.dtype.element_ty).to(tl.float32)
    store_part(res_ptr, a, kept, N, A)
    square = tl.sum(kept * kept, axis=0)
    if B > 0:
        kept_b = (xb * rstd * wxb + rb).to(res_ptr.dtype.element_ty).to(tl.float32)
        store_part(res_ptr, b, kept_b, N, A + B)
        square += tl.sum(kept_b * kept_b, axis=0)
    rstd = tl.rsqrt(square / N + eps)
    _outs(kept, rstd, dense_ptr, router_ptr, experts_ptr, wda, wra, wea, a, N, A)
    if B > 0:
        _outs(kept_b, rstd, dense_ptr, router_ptr, experts_ptr, wdb, wrb, web, b, N, A + B)


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _triple_rmsnorm_kernel(
    x_ptr,
    r_ptr,
    wx_ptr,
    wd_ptr,
    wr_ptr,
    we_ptr,
    res_ptr,
    dense_ptr,
    router_ptr,
    experts_ptr,
    rows,
    stride_x,
    stride_r,
    eps_x,
    eps,
    N: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    a = tl.arange(0, A)
    wxa, wda = load_part(wx_ptr, a, N, A), load_part(wd_ptr, a, N, A)
    wra, wea = load_part(wr_ptr, a, N, A), load_part(we_ptr, a, N, A)
    b, wxb, wdb, wrb, web = a, wxa, wda, wra, wea
    if B > 0:
        b = A + tl.arange(0, B)
        wxb, wdb = load_part(wx_ptr, b, N, A + B), load_part(wd_ptr, b, N, A + B)
        wrb, web = load_part(wr_ptr, b, N, A + B), load_part(we_ptr, b, N, A + B)
    row = tl.program_id(0).to(tl.int64)
    if LOOP:
        programs = tl.num_programs(0)
        for step in tl.range(0, tl.cdiv(rows - tl.program_id(0), programs), num_stages=STAGES):
            _row(
                x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr,
                wxa, wda, wra, wea, wxb, wdb, wrb, web,
                row + step * programs, stride_x, stride_r, eps_x, eps, a, b, N, A, B,
            )  # fmt: skip
    else:
        _row(
            x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr,
            wxa, wda, wra, wea, wxb, wdb, wrb, web,
            row, stride_x, stride_r, eps_x, eps, a, b, N, A, B,
        )  # fmt: skip


def cut(rows: int, columns: int) -> Cut:
    """The fastest on a H200; ``benchmarks/triple_rmsnorm.py --tune`` tries the others."""
    if columns <= 2048:
        return Cut(8, pdl=True)
    if rows <= 256:
        return Cut(4 if rows <= 16 else 16, pdl=True)
    return Cut(2 if columns <= 2560 else 16, pdl=True)


def triple_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    w_x: torch.Tensor,
    w_dense: torch.Tensor,
    w_router: torch.Tensor,
    w_experts: torch.Tensor,
    eps_x: float,
    eps: float,
    how: Cut | None = None,
) -> Normed:
    """New residual and the inputs of the dense MLP, the router and the experts; new tensors.

    x, residual: [rows, columns], float16, bfloat16 or float32, adjacent columns, any row stride.
    w_*: [columns]. Raises ValueError for other shapes.
    """
    rows, columns = x.shape
    needs_rows(x, "x", rows, columns)
    needs_rows(residual, "residual", rows, columns)
    outs = Normed(*(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(4)))
    if rows == 0:
        return outs
    how = how or cut(rows, columns)
    first, second = how.parts(columns)
    _triple_rmsnorm_kernel[(how.grid(rows, x.device),)](
        x,
        residual,
        w_x,
        w_dense,
        w_router,
        w_experts,
        *outs,
        rows,
        x.stride(0),
        residual.stride(0),
        eps_x,
        eps,
        N=columns,
        LOOP=how.per_sm > 0,
        STAGES=how.stages,
        A=first,
        B=second,
        **options(how, x.device),
    )
    return outs


def reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    w_x: torch.Tensor,
    w_dense: torch.Tensor,
    w_router: torch.Tensor,
    w_experts: torch.Tensor,
    eps_x: float,
    eps: float,
) -> Normed:
    """The same in torch."""

    def norm(t: torch.Tensor, e: float) -> torch.Tensor:
        return t * torch.rsqrt(t.square().mean(-1, keepdim=True) + e)

    kept = (norm(x.float(), eps_x) * w_x.float() + residual.float()).to(x.dtype)
    n = norm(kept.float(), eps)
    return Normed(kept, *((n * w.float()).to(x.dtype) for w in (w_dense, w_router, w_experts)))


@for_graphs(
    "(Tensor x, Tensor residual, Tensor w_x, Tensor w_dense, Tensor w_router, Tensor w_experts, "
    "float eps_x, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, *others: tuple(x.new_empty(x.shape) for _ in range(4)),
)
def triple_rmsnorm_op(
    x: torch.Tensor,
    residual: torch.Tensor,
    w_x: torch.Tensor,
    w_dense: torch.Tensor,
    w_router: torch.Tensor,
    w_experts: torch.Tensor,
    eps_x: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return tuple(triple_rmsnorm(x, residual, w_x, w_dense, w_router, w_experts, eps_x, eps))
