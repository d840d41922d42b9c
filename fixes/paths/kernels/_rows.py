"""How a kernel that works row by row is cut into programs, and its op for compiled graphs.

A program holds a row in a block of a power of two, which no model's width is: a row of 2560 leaves
1536 of 4096 lanes idle. They cost nothing: held in two parts, 2048 and 512, it is slower, says a
H200. So it says of marking what is read and written as first to leave the L2 cache.
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
    """warps: of one program. per_sm: programs per SM, each taking every n-th row; 0: one program
    for each row. stages: rows whose loads are in flight in such a loop. pdl: see options()."""

    warps: int
    per_sm: int = 0
    stages: int = 1
    pdl: bool = False

    def grid(self, rows: int, device: torch.device) -> int:
        """Programs for so many rows."""
        return min(rows, self.per_sm * _sms(device.index or 0)) if self.per_sm else rows


class Tile(NamedTuple):
    """rows and warps of one program. pdl: see options()."""

    rows: int
    warps: int
    pdl: bool = False


def options(how: Cut | Tile, device: torch.device) -> dict[str, Any]:
    """Launch options. With pdl, on sm90 and later, a kernel is launched while the one before it
    still runs, and waits for its end before it reads anything (CUDA's programmatic dependent
    launch); it allows the next one the same."""
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
        return 2  # the interpreter: enough to go round the loop
    return torch.cuda.get_device_properties(index).multi_processor_count


@triton.jit
def in_turn(PDL: tl.constexpr):
    """How a kernel begins: see options()."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def tile_at(tile, rows, first, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows (int64 [ROWS, 1]) and columns ([1, BLOCK], from ``first`` on) of a Tile, and which of
    its elements are among rows x N."""
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    cols = first + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (cols < N)
    return row.to(tl.int64), cols, inside


@triton.jit
def load_row(ptr, cols, N: tl.constexpr):
    """float32 of the N columns of a row, 0 beyond them."""
    return tl.load(ptr + cols, mask=cols < N, other=0.0).to(tl.float32)


@triton.jit
def store_row(ptr, cols, values, N: tl.constexpr):
    """Rounds to ptr's dtype."""
    tl.store(ptr + cols, values.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def clipped(x, low_ptr, high_ptr):
    """float32 of x as torch.clamp leaves it: bounds are rounded to x's dtype, a NaN stays one.

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


def for_graphs(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Makes of a launcher an op ``g4debug::<name>`` that torch.compile does not look into.

    A launcher picks its cut by the number of rows; traced, that choice would become a guard
    and each batch size a recompilation. Eager code calls the launcher: an op costs microseconds.
    """

    def make(launcher: Callable[..., Any]) -> Any:
        name = f"g4debug::{launcher.__name__}"
        op = torch.library.custom_op(name, launcher, mutates_args=(), schema=schema)
        op.register_fake(fake)
        return op

    return make
