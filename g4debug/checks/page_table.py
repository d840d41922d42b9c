"""The page-table invariant: a live cell points into the pool that the layer reads.

Pure functions on tensors; the Triton kernel in :mod:`g4debug.kernels.page_guard` computes
the same. A cell (row, column) is *dereferenced* if ``column < ceil(seq_len / page_size)``,
and *live* if, for a sliding layer, it also overlaps the window of the row's first query
token. Cells past the row's length are legal garbage: zeros, or what an earlier owner of
the row left (sglang mem_cache/allocator.py never hands out page 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TableCheck:
    """safe: the table with out-of-range dereferenced cells set to the reserved page 0,
    cells past the row's length set to 0. first_live: int64 [rows], first live column.
    bad: int64 [n, 3] of (row, column, value), sorted by row, then column."""

    safe: torch.Tensor
    first_live: torch.Tensor
    bad: torch.Tensor


def check_page_table(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: int,
    page_size: int,
    window: int = -1,
    q_lens: torch.Tensor | None = None,
) -> TableCheck:
    """Check a page table against one pool.

    table: int32 or int64 [rows, columns], any strides. seq_lens: integer [rows], tokens
    whose KV may be read. pages: valid indices are 0..pages-1. window: tokens to the left
    of a query token that it sees besides itself (FlashInfer's ``window_left``), -1 for
    none. q_lens: integer [rows], query tokens of each row, default 1.
    """
    rows, columns = table.shape
    device = table.device
    lengths = seq_lens.to(torch.int64)
    queries = torch.ones_like(lengths) if q_lens is None else q_lens.to(torch.int64)
    used = ((lengths + page_size - 1) // page_size).clamp(min=0, max=columns)
    first_live = torch.zeros(rows, dtype=torch.int64, device=device)
    if window >= 0:
        first_live = (lengths - queries - window).clamp(min=0) // page_size
    column = torch.arange(columns, device=device)[None, :]
    values = table.to(torch.int64)
    dereferenced = column < used[:, None]
    outside = dereferenced & ((values < 0) | (values >= pages))
    bad = outside & (column >= first_live[:, None])
    where = bad.nonzero()
    found = torch.cat([where, values[bad][:, None]], dim=1)
    safe = torch.where(dereferenced & ~outside, table, torch.zeros_like(table))
    return TableCheck(safe, first_live, found)
