"""The norms between attention and a mixture of experts, in one launch.

For each row, in float32::

    residual'    = round(x * rsqrt(mean(x^2) + eps_x) * w_x + residual)
    n            = residual' * rsqrt(mean(residual'^2) + eps)
    dense, router, experts = n * w_dense, n * w_router, n * w_experts

x is the output of attention. ``residual'`` is rounded to its dtype before it is normed. So all
three inputs are norms of the tensor that the layer goes on with. x and residual are read once, and
each of the four outputs is written once. According to seed PR #18, vLLM's Inductor found that the
three norms of this layer can share one sum of squares
(``triton_red_fused_add_moe_forward_mul_rms_norm_0``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from g4debug.fixes.paths.kernels._rows import (
    Cut,
    for_graphs,
    in_turn,
    load_row,
    needs_rows,
    options,
    store_row,
)


class Normed(NamedTuple):
    """The four outputs, each [rows, columns] of x's dtype."""

    residual: torch.Tensor
    dense: torch.Tensor
    router: torch.Tensor
    experts: torch.Tensor


@triton.jit
def _row(
    x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr, wx, wd, wr, we,
    row, stride_x, stride_r, eps_x, eps, cols, N: tl.constexpr,
):  # fmt: skip
    x = load_row(x_ptr + row * stride_x, cols, N)
    r = load_row(r_ptr + row * stride_r, cols, N)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps_x)
    kept = (x * rstd * wx + r).to(res_ptr.dtype.element_ty).to(tl.float32)
    store_row(res_ptr + row * N, cols, kept, N)
    n = kept * tl.rsqrt(tl.sum(kept * kept, axis=0) / N + eps)
    store_row(dense_ptr + row * N, cols, n * wd, N)
    store_row(router_ptr + row * N, cols, n * wr, N)
    store_row(experts_ptr + row * N, cols, n * we, N)


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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    cols = tl.arange(0, BLOCK)
    wx = load_row(wx_ptr, cols, N)
    wd = load_row(wd_ptr, cols, N)
    wr = load_row(wr_ptr, cols, N)
    we = load_row(we_ptr, cols, N)
    row = tl.program_id(0).to(tl.int64)
    if LOOP:
        programs = tl.num_programs(0)
        for step in tl.range(0, tl.cdiv(rows - tl.program_id(0), programs), num_stages=STAGES):
            _row(
                x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr, wx, wd, wr, we,
                row + step * programs, stride_x, stride_r, eps_x, eps, cols, N,
            )  # fmt: skip
    else:
        _row(
            x_ptr, r_ptr, res_ptr, dense_ptr, router_ptr, experts_ptr, wx, wd, wr, we,
            row, stride_x, stride_r, eps_x, eps, cols, N,
        )  # fmt: skip


def cut(rows: int, columns: int) -> Cut:
    """The fastest cut on a H200. ``benchmarks/triple_rmsnorm.py --tune`` tries the others."""
    if columns > 2048:
        return Cut(2 if columns <= 2560 and rows > 1024 else 4, pdl=True)
    return Cut(8 if rows <= 1024 else 2, pdl=True)


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
    """The new residual and the inputs of the dense MLP, the router and the experts, as new tensors.

    x, residual: [rows, columns], float16, bfloat16 or float32, with adjacent columns and any row
    stride. w_*: [columns]. Raises ValueError for other shapes.
    """
    rows, columns = x.shape
    needs_rows(x, "x", rows, columns)
    needs_rows(residual, "residual", rows, columns)
    outs = Normed(*(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(4)))
    if rows == 0:
        return outs
    how = how or cut(rows, columns)
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
        BLOCK=triton.next_power_of_2(columns),
        **options(how, x.device),
    )
    return outs


triple_rmsnorm_op = for_graphs(
    triple_rmsnorm,
    "(Tensor x, Tensor residual, Tensor w_x, Tensor w_dense, Tensor w_router, Tensor w_experts, "
    "float eps_x, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, *others: tuple(x.new_empty(x.shape) for _ in range(4)),
)
