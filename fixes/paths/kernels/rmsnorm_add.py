"""RMSNorm, residual and layer scalar in one launch.

For each row, in float32 and rounded once at the end::

    out = (x * rsqrt(mean(x^2) + eps) * weight + residual) * scalar

SGLang also rounds after the norm and after the sum. One program holds a row in registers: x and
residual are read once, and out is written once. A program takes one row, or several rows in a loop;
this is as in Liger-Kernel's RMSNorm and in Triton's tutorial of persistent kernels.
"""

from __future__ import annotations

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


@triton.jit
def _row(x_ptr, r_ptr, out_ptr, w, scale, eps, cols, N: tl.constexpr):
    x = load_row(x_ptr, cols, N)
    r = load_row(r_ptr, cols, N)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    store_row(out_ptr, cols, (x * rstd * w + r) * scale, N)


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _rmsnorm_add_kernel(
    x_ptr,
    w_ptr,
    r_ptr,
    scalar_ptr,
    out_ptr,
    rows,
    stride_x,
    stride_r,
    eps,
    N: tl.constexpr,
    HAS_SCALAR: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    cols = tl.arange(0, BLOCK)
    w = load_row(w_ptr, cols, N)
    scale = 1.0
    if HAS_SCALAR:
        scale = tl.load(scalar_ptr).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    if LOOP:
        programs = tl.num_programs(0)
        for step in tl.range(0, tl.cdiv(rows - tl.program_id(0), programs), num_stages=STAGES):
            at = row + step * programs
            _row(
                x_ptr + at * stride_x, r_ptr + at * stride_r, out_ptr + at * N,
                w, scale, eps, cols, N,
            )  # fmt: skip
    else:
        _row(
            x_ptr + row * stride_x, r_ptr + row * stride_r, out_ptr + row * N,
            w, scale, eps, cols, N,
        )  # fmt: skip


def cut(rows: int, columns: int) -> Cut:
    """The fastest cut on a H200. ``benchmarks/ple_tail.py --tune`` tries the others."""
    if rows <= 256:
        return Cut(8 if columns <= 2048 else 16, pdl=True)
    return Cut(4, pdl=True)


def rmsnorm_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    scalar: torch.Tensor | None = None,
    how: Cut | None = None,
) -> torch.Tensor:
    """``rmsnorm(x, weight) + residual``, times ``scalar`` if given, as a new tensor like x.

    x, residual: [rows, columns], float16, bfloat16 or float32, with adjacent columns and any row
    stride. weight: [columns]. scalar: one element, on the device. Raises ValueError for other
    shapes.
    """
    rows, columns = x.shape
    needs_rows(x, "x", rows, columns)
    needs_rows(residual, "residual", rows, columns)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    how = how or cut(rows, columns)
    _rmsnorm_add_kernel[(how.grid(rows, x.device),)](
        x,
        weight,
        residual,
        weight if scalar is None else scalar,
        out,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        N=columns,
        HAS_SCALAR=scalar is not None,
        LOOP=how.per_sm > 0,
        STAGES=how.stages,
        BLOCK=triton.next_power_of_2(columns),
        **options(how, x.device),
    )
    return out


rmsnorm_add_op = for_graphs(
    rmsnorm_add,
    "(Tensor x, Tensor weight, Tensor residual, float eps, Tensor? scalar=None) -> Tensor",
    lambda x, weight, residual, eps, scalar=None: x.new_empty(x.shape),
)
