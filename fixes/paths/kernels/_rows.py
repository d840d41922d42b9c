"""How a kernel that works row by row is divided into programs, and its op for compiled graphs.

A program holds a row in a block, and the size of a block is a power of two. No model has such a
width: a row of 2560 leaves 1536 of 4096 lanes idle. They cost nothing: on a H200 it was slower to
hold the row in two parts of 2048 and 512. It was also slower to mark the inputs and outputs as the
first to leave the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Bounds = tuple[torch.Tensor, torch.Tensor]  # lowest and highest, one element each, on the device


class Cut(NamedTuple):
    """How rows are divided into programs.

    warps: the warps of one program. per_sm: programs per SM, of which each takes every n-th row in
    a loop; 0 means one program for each row. stages: how many rows of such a loop are loaded at a
    time. pdl: see options().
    """

    warps: int
    per_sm: int = 0
    stages: int = 1
    pdl: bool = False

    def grid(self, rows: int, device: torch.device) -> int:
        """The number of programs for this many rows."""
        return min(rows, self.per_sm * _sms(device.index or 0)) if self.per_sm else rows


class Tile(NamedTuple):
    """The rows and the warps of one program. pdl: see options()."""

    rows: int
    warps: int
    pdl: bool = False


def options(how: Cut | Tile, device: torch.device) -> dict[str, Any]:
    """The launch options.

    With pdl, on sm90 and later, a kernel is launched while the one before it still runs, and waits
    for its end before it reads anything (CUDA's programmatic dependent launch). It allows the next
    kernel to do the same.
    """
    pdl = how.pdl and _takes_pdl(device.index or 0)
    return {"num_warps": how.warps, "PDL": pdl} | ({"launch_pdl": True} if pdl else {})


@lru_cache
def _takes_pdl(index: int) -> bool:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index)[0] >= 9


@lru_cache
def _sms(index: int) -> int:
    if not torch.cuda.is_available():
        return 2  # for the interpreter: enough to go through the loop more than once
    return torch.cuda.get_device_properties(index).multi_processor_count


@triton.jit
def in_turn(PDL: tl.constexpr):
    """Each kernel begins with this; see options()."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def tile_at(tile, rows, first, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows (int64 [ROWS, 1]) and columns ([1, BLOCK], from ``first`` on) of a Tile, and which
    of its elements are inside of rows x N."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    cols = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (cols < N)
    return row.to(tl.int64), cols, inside


@triton.jit
def load_row(ptr, cols, N: tl.constexpr):
    """The N columns of a row as float32, and 0 beyond them."""
    return tl.load(ptr + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, cols, values, N: tl.constexpr):
    """Store a row, rounded to ptr's dtype."""
    tl.store(ptr + cols, values.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def clipped(x, low_ptr, high_ptr):
    """x as float32, clamped as by torch.clamp: bounds are rounded to x's dtype, a NaN stays a NaN.

    low_ptr, high_ptr: one element each.
    """
    low = tl.load(low_ptr).to(x.dtype).to(tl.float32)
    high = tl.load(high_ptr).to(x.dtype).to(tl.float32)
    wide = tl.maximum(x.to(tl.float32), low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(wide, high, propagate_nan=tl.PropagateNan.ALL)


def needs_rows(tensor: torch.Tensor, name: str, rows: int, columns: int) -> None:
    """Raise ValueError unless ``tensor`` is [rows, columns] with its columns side by side."""
    if tensor.shape != (rows, columns) or tensor.stride(1) != 1:
        raise ValueError(
            f"{name}: got shape {tuple(tensor.shape)} with strides {tensor.stride()}, expected "
            f"({rows}, {columns}) with adjacent columns; pass a contiguous tensor"
        )
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name}: got {tensor.dtype}, expected float16, bfloat16 or float32")


def for_graphs(launcher: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Any:
    """A launcher as an op ``g4debug::<name>_op`` that torch.compile does not look into.

    A launcher chooses how to divide the work by the number of rows. If torch.compile traced that,
    it would compile anew for each batch size. Eager code calls the launcher itself, because an op
    costs microseconds.
    """
    name = f"g4debug::{launcher.__name__}_op"
    op = torch.library.custom_op(name, launcher, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op
