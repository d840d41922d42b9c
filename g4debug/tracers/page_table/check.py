"""The page-table invariant: a live cell holds the page that SGLang's own books say.

Pure functions on tensors; the Triton kernel in :mod:`g4debug.tracers.page_table.guard` computes
the same. A cell (row, column) is *dereferenced* if ``column < ceil(seq_len / page_size)``,
and *live* if, for a sliding layer, it also overlaps the window of the row's first query
token. Cells past the row's length are legal garbage: zeros, or what an earlier owner of
the row left (sglang mem_cache/allocator.py never hands out page 0).

Without a :class:`Truth` only ranges are checked. With one, a live cell of a row that is some
request's is also compared with ``req_to_token`` and with what the allocators did.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

FREE = -1  # word of a free page in the shadow, see kernels.page_shadow
UNKNOWN = -1  # no expected page


class Kind(IntEnum):
    """What is wrong with a cell, or with a row (SHORT)."""

    NEGATIVE = 1  # page < 0
    RANGE = 2  # page >= pages
    SHORT = 3  # the row has fewer columns than its length has pages
    ZERO = 4  # the reserved page 0 in a live cell
    MISMATCH = 5  # another page than req_to_token (and the mapping) say
    FREED = 6  # the request's full-pool page is free
    EVICTED = 7  # the request's SWA page is gone, though the window still reaches it


@dataclass(frozen=True)
class Truth:
    """What a table must agree with; all tensors on the table's device.

    req_to_token: int32 [requests, tokens], token indices of the full pool. req_pool_indices:
    integer [>= rows], the request of each row, as its row of req_to_token; 0 is no request
    (SGLang's padding), and such rows are not judged. swa: the table is of the SWA pool. shadow:
    int32 [full pages + 1], see :mod:`g4debug.ledger.shadow`. mapping: int64 [>= full tokens],
    SGLang's ``full_to_swa_index_mapping``, read only where there is no shadow. padding: rows of at
    most this many tokens are not judged: a CUDA graph's padding rows keep those of an earlier
    batch, and are known by their length alone.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    swa: bool = False
    shadow: torch.Tensor | None = None
    mapping: torch.Tensor | None = None
    padding: int = 0


@dataclass(frozen=True)
class TableCheck:
    """What :func:`check_page_table` found.

    safe: the table for the kernel: a bad cell holds the expected page if that is in range and
    held, else the reserved page 0; cells past the row's length are 0. first_live: int64 [rows],
    first live column. bad: int64 [n, 3] of (row, column, value), sorted by row, then column;
    kinds, expected: int64 [n], its Kind and the page that belongs there, UNKNOWN if not known.
    short: int64 [m, 2] of (row, columns that it needs).
    """

    safe: torch.Tensor
    first_live: torch.Tensor
    bad: torch.Tensor
    kinds: torch.Tensor
    expected: torch.Tensor
    short: torch.Tensor


def check_page_table(
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: int,
    page_size: int,
    window: int = -1,
    q_lens: torch.Tensor | None = None,
    truth: Truth | None = None,
) -> TableCheck:
    """Check a page table against one pool.

    table: int32 or int64 [rows, columns], any strides. seq_lens: integer [rows], tokens
    whose KV may be read. pages: valid indices are 0..pages-1. window: tokens to the left
    of a query token that it sees besides itself (FlashInfer's ``window_left``), -1 for
    none. q_lens: integer [rows], query tokens of each row, default 1. truth: what the cells
    must agree with, None to check ranges alone.
    """
    rows, columns = table.shape
    device = table.device
    lengths = seq_lens.to(torch.int64)
    queries = torch.ones_like(lengths) if q_lens is None else q_lens.to(torch.int64)
    needed = ((lengths + page_size - 1) // page_size).clamp(min=0)
    first_live = torch.zeros(rows, dtype=torch.int64, device=device)
    if window >= 0:
        first_live = (lengths - queries - window).clamp(min=0) // page_size
    column = torch.arange(columns, device=device)[None, :]
    values = table.to(torch.int64)
    dereferenced = column < needed[:, None]
    live = dereferenced & (column >= first_live[:, None])
    kind = torch.zeros_like(values)
    expected = torch.full_like(values, UNKNOWN)
    repaired = torch.zeros_like(values)
    if truth is not None and rows and columns:
        judged = live & (lengths > truth.padding)[:, None]
        kind, expected, held = _disagreements(values, judged, page_size, truth)
        repaired = torch.where(held & (expected > 0) & (expected < pages), expected, repaired)
    outside = (values < 0) | (values >= pages)
    kind[values < 0] = int(Kind.NEGATIVE)
    kind[values >= pages] = int(Kind.RANGE)
    kind[~live] = 0
    bad = kind > 0
    safe = torch.where(bad, repaired, torch.where(outside, 0, values))
    short = needed > columns if columns else torch.zeros_like(needed, dtype=torch.bool)
    return TableCheck(
        safe=torch.where(dereferenced, safe, 0).to(table.dtype),
        first_live=first_live,
        bad=torch.cat([bad.nonzero(), values[bad][:, None]], dim=1),
        kinds=kind[bad],
        expected=expected[bad],
        short=torch.stack([short.nonzero()[:, 0], needed[short]], dim=1),
    )


def _disagreements(
    values: torch.Tensor, judged: torch.Tensor, page_size: int, truth: Truth
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Kind of each cell or 0, the page that belongs there, whether the allocator gave it)."""
    rows, columns = values.shape
    requests, tokens = truth.req_to_token.shape
    request = truth.req_pool_indices[:rows].to(torch.int64)
    at = torch.arange(columns, device=values.device) * page_size
    judged = judged & ((request > 0) & (request < requests))[:, None] & (at < tokens)
    token = truth.req_to_token[request.clamp(0, requests - 1)][:, at.clamp(max=tokens - 1)]
    full = torch.where(token < 0, UNKNOWN, token.to(torch.int64) // page_size)
    freed = torch.zeros_like(judged)
    word = torch.zeros_like(full)
    if truth.shadow is not None:
        sound = truth.shadow[-1] == 1
        inside = (full > 0) & (full < truth.shadow.numel() - 1)
        word = torch.where(inside, truth.shadow[torch.where(inside, full, 0)], 0).to(torch.int64)
        freed = sound & inside & (word == FREE)
        if truth.swa:  # of a page that does not exist, the shadow knows nothing
            judged = judged & sound & (inside | (full == 0))
    elif truth.swa:
        assert truth.mapping is not None
        known = (token >= 0) & (token < truth.mapping.numel())
        there = truth.mapping[torch.where(known, token, 0).to(torch.int64)]
        judged = judged & known & (there >= 0)
        word = there // page_size
    expected = torch.where(freed, UNKNOWN, word) if truth.swa else full
    kind = torch.zeros_like(values)
    kind[values != expected] = int(Kind.MISMATCH)
    kind[(values == 0) & (expected != UNKNOWN)] = int(Kind.ZERO)
    if truth.swa:
        kind[(full > 0) & (word == 0)] = int(Kind.EVICTED)
    kind[freed] = int(Kind.FREED)
    kind[~judged] = 0
    return kind, torch.where(judged, expected, UNKNOWN), judged & ~freed
