"""GELU of a clipped gate times a clipped value, clipped again, in one launch.

For each element, in float32 and rounded once::

    out = clamp(gelu(clamp(gate)) * clamp(up))

gelu is the tanh form (``gelu_mul.py``). The bounds are read on the device, so that a weight update
takes effect. It is the work between the two GEMMs of the vision tower's MLP. SGLang 0.5.12 launches
five kernels for it, and rounds after gelu and after the product.
"""

from __future__ import annotations

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
from g4debug.fixes.paths.kernels.gelu_mul import gelu

COLUMNS = 1024  # columns of one program; a row is divided, as its width is no power of two


@triton.jit(do_not_specialize=["rows"])  # one binary for all batch sizes
def _clipped_gelu_mul_kernel(
    both_ptr,
    gate_low_ptr,
    gate_high_ptr,
    up_low_ptr,
    up_high_ptr,
    low_ptr,
    high_ptr,
    out_ptr,
    rows,
    stride,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    in_turn(PDL)
    parts: tl.constexpr = (N + BLOCK - 1) // BLOCK
    program = tl.program_id(0)  # only one axis, because the others end at 65,535
    row, cols, inside = tile_at(program // parts, rows, (program % parts) * BLOCK, N, ROWS, BLOCK)
    gate = tl.load(both_ptr + row * stride + cols, mask=inside, other=0.0)
    up = tl.load(both_ptr + row * stride + N + cols, mask=inside, other=0.0)
    product = gelu(clipped(gate, gate_low_ptr, gate_high_ptr)) * clipped(
        up, up_low_ptr, up_high_ptr
    )
    out = clipped(product.to(out_ptr.dtype.element_ty), low_ptr, high_ptr)
    tl.store(out_ptr + row * N + cols, out.to(out_ptr.dtype.element_ty), mask=inside)


def tile(rows: int) -> Tile:
    """The fastest tile on a H200 for six pictures. ``benchmarks/vision_layer.py --tune`` tries the
    others."""
    return Tile(1, 1, pdl=True)


def clipped_gelu_mul(
    both: torch.Tensor, gate: Bounds, up: Bounds, out: Bounds, how: Tile | None = None
) -> torch.Tensor:
    """``clamp(gelu(clamp(both[:, :n])) * clamp(both[:, n:]))``: a new tensor [rows, n].

    both: [rows, 2 n], float16, bfloat16 or float32, with adjacent columns and any row stride. gate,
    up, out: the bounds of each. Raises ValueError for other shapes.
    """
    rows, columns = both.shape
    needs_rows(both, "both", rows, columns)
    if columns % 2:
        raise ValueError(
            f"both: got {columns} columns, expected as many for the gate as for the values"
        )
    made = torch.empty((rows, columns // 2), dtype=both.dtype, device=both.device)
    if made.numel() == 0:
        return made
    how = how or tile(rows)
    block = min(COLUMNS, triton.next_power_of_2(columns // 2))
    grid = triton.cdiv(rows, how.rows) * triton.cdiv(columns // 2, block)
    _clipped_gelu_mul_kernel[(grid,)](
        both,
        *gate,
        *up,
        *out,
        made,
        rows,
        both.stride(0),
        N=columns // 2,
        ROWS=how.rows,
        BLOCK=block,
        **options(how, both.device),
    )
    return made


def reference(both: torch.Tensor, gate: Bounds, up: Bounds, out: Bounds) -> torch.Tensor:
    """The same computation in torch."""
    g, u = both.chunk(2, dim=-1)
    g, u = torch.clamp(g, *gate).float(), torch.clamp(u, *up).float()
    product = torch.nn.functional.gelu(g, approximate="tanh") * u
    return torch.clamp(product.to(both.dtype), *out)
