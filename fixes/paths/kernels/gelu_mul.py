"""GELU (tanh form) of a gate times another tensor, in one launch.

For each element, in float32 and rounded once::

    out = gelu(gate) * x,   gelu(g) = g / 2 * (1 + tanh(u)) = g * sigmoid(2 u)
    u = sqrt(2 / pi) * (g + 0.044715 g^3)

The form with the sigmoid needs only one exponential and loses no digits for negative g. SGLang also
rounds after gelu.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from g4debug.fixes.paths.kernels._rows import (
    Tile,
    for_graphs,
    in_turn,
    needs_rows,
    options,
    tile_at,
)


@triton.jit
def gelu(g):
    """GELU (tanh form) of float32."""
    u = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    return g * tl.sigmoid(2.0 * u)


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _gelu_mul_kernel(
    gate_ptr,
    x_ptr,
    out_ptr,
    rows,
    stride_gate,
    stride_x,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    row, cols, inside = tile_at(tl.program_id(0), rows, 0, N, ROWS, BLOCK)
    g = tl.load(gate_ptr + row * stride_gate + cols, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    out = gelu(g) * x
    tl.store(out_ptr + row * N + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def tile(rows: int) -> Tile:
    """The fastest tile on a H200. ``benchmarks/ple_tail.py --tune`` tries the others."""
    return Tile(2, 8, pdl=True) if rows <= 512 else Tile(4, 4, pdl=True)


def gelu_mul(gate: torch.Tensor, x: torch.Tensor, how: Tile | None = None) -> torch.Tensor:
    """``gelu(gate, approximate="tanh") * x`` as a new tensor like gate.

    gate, x: [rows, columns], float16, bfloat16 or float32, with adjacent columns and any row
    stride. Raises ValueError for other shapes.
    """
    rows, columns = gate.shape
    needs_rows(gate, "gate", rows, columns)
    needs_rows(x, "x", rows, columns)
    out = torch.empty((rows, columns), dtype=gate.dtype, device=gate.device)
    if rows == 0:
        return out
    how = how or tile(rows)
    _gelu_mul_kernel[(triton.cdiv(rows, how.rows),)](
        gate,
        x,
        out,
        rows,
        gate.stride(0),
        x.stride(0),
        N=columns,
        ROWS=how.rows,
        BLOCK=triton.next_power_of_2(columns),
        **options(how, gate.device),
    )
    return out


gelu_mul_op = for_graphs(
    gelu_mul,
    "(Tensor gate, Tensor x) -> Tensor",
    lambda gate, x: gate.new_empty(gate.shape),
)
