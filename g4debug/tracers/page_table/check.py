"""What must hold for a page table: each live cell holds the page that belongs there.

These are pure functions on tensors. The Triton kernel in :mod:`g4debug.tracers.page_table.guard`
computes the same. A cell (row, column) is *dereferenced* if ``column < ceil(seq_len / page_size)``.
It is *live* if, in a sliding layer, it also overlaps the window of the row's first query token.
Cells behind the row's length are legal garbage: zeros, or what an earlier owner of the row left.
Page 0 is never handed out (sglang mem_cache/allocator.py).

Without a :class:`Truth` only ranges are checked. With one, the live cells of a row that belongs to
a request are also compared with ``req_to_token`` and with what the allocators did.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.findings import kinds
from g4debug.sanitizer.reference_state import Truth as Truth

Kind = kinds.PageTableKind
FREE = -1  # word of a free page in the shadow, see ledger/shadow.py
UNKNOWN = -1  # it is not known which page is expected


@dataclass(frozen=True)
class TableCheck:
    """What :func:`check_page_table` found.

    safe: the table for the kernel. In place of a bad cell it has the expected page if that is in
        range and held, else the reserved page 0. Cells behind the row's length are 0. A FOREIGN
        cell stays as it is: it harms nobody's memory, and is a finding only if it is confirmed.
    first_live: int64 [rows], the first live column.
    bad: int64 [n, 3], (row, column, value) of each bad cell, sorted by row, then by column.
    kinds: int64 [n], the Kind of each bad cell.
    expected: int64 [n], the page that belongs in each bad cell, UNKNOWN if not known.
    short: int64 [m, 2], (row, columns that it needs) of each row that is too short.
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
    repair: bool = True,
) -> TableCheck:
    """Check a page table against one pool.

    table: int32 or int64 [rows, columns], any strides.
    seq_lens: integer [rows], the number of tokens whose KV may be read.
    pages: valid page indices are 0..pages-1.
    window: how many tokens before itself a query token sees (FlashInfer's ``window_left``), -1
        for all.
    q_lens: integer [rows], the number of query tokens of each row, 1 if None.
    truth: what the cells must agree with, None to check ranges alone.
    repair: whether ``safe`` has another page for a bad cell that names a page of the pool. If not,
        it differs from the table only in what would crash the kernel, so that a wrong suspicion
        changes no answer.
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
        kind, expected, held = disagreements(values, judged, page_size, truth)
        repaired = torch.where(held & (expected > 0) & (expected < pages), expected, repaired)
    outside = (values < 0) | (values >= pages)
    kind[values < 0] = int(Kind.NEGATIVE)
    kind[values >= pages] = int(Kind.RANGE)
    kind[~live] = 0
    bad = kind > 0
    replaced = bad & (kind != int(Kind.FOREIGN)) & (outside if not repair else True)
    safe = torch.where(replaced, repaired, torch.where(outside, 0, values))
    short = needed > columns if columns else torch.zeros_like(needed, dtype=torch.bool)
    return TableCheck(
        safe=torch.where(dereferenced, safe, 0).to(table.dtype),
        first_live=first_live,
        bad=torch.cat([bad.nonzero(), values[bad][:, None]], dim=1),
        kinds=kind[bad],
        expected=expected[bad],
        short=torch.stack([short.nonzero()[:, 0], needed[short]], dim=1),
    )


def disagreements(
    values: torch.Tensor, judged: torch.Tensor, page_size: int, truth: Truth
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each cell: its Kind or 0, the page that belongs there, and whether that page is held."""
    rows, columns = values.shape
    column = torch.arange(columns, device=values.device)[None, :]
    row = torch.arange(rows, device=values.device)[:, None]
    found = belongs(row, column, judged, page_size, truth)
    kind = torch.zeros_like(values)
    kind[values != found.page] = int(Kind.MISMATCH)
    kind[(values == 0) & (found.page != UNKNOWN)] = int(Kind.ZERO)
    return found.kinds(kind), found.expected(kind, found.page), found.judged & ~found.freed


@dataclass(frozen=True)
class Belongs:
    """What belongs in each cell. All are of the cells' shape.

    judged: the truth knows. full: the page of the full pool that ``req_to_token`` names, or
    UNKNOWN. page: of the cell's own pool, UNKNOWN if it was freed. freed, foreign, evicted: that
    page is what the Kind of this name says.
    """

    judged: torch.Tensor
    full: torch.Tensor
    page: torch.Tensor
    freed: torch.Tensor
    foreign: torch.Tensor
    evicted: torch.Tensor

    def kinds(self, kind: torch.Tensor) -> torch.Tensor:
        """Put what is wrong with the page itself over ``kind``, what is wrong with the cell."""
        kind[self.evicted] = int(Kind.EVICTED)
        kind[self.freed] = int(Kind.FREED)
        kind[self.foreign & (kind == 0)] = int(Kind.FOREIGN)
        kind[~self.judged] = 0
        return kind

    def expected(self, kind: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """``right``, and UNKNOWN where it is not known what belongs there."""
        return torch.where(self.judged & (kind != int(Kind.FOREIGN)), right, UNKNOWN)


def belongs(
    row: torch.Tensor, column: torch.Tensor, judged: torch.Tensor, page_size: int, truth: Truth
) -> Belongs:
    """What belongs in the cells (row, column). row, column, judged: of shapes that broadcast."""
    requests, words = truth.req_to_token.shape
    request = truth.req_pool_indices.to(torch.int64)[row]
    at, cell = column * page_size, column * (truth.apart or page_size)
    judged = judged & (request > 0) & (request < requests) & (cell < words)
    token = truth.req_to_token[request.clamp(0, requests - 1), cell.clamp(max=words - 1)]
    full = torch.where(token < 0, UNKNOWN, token.to(torch.int64) // page_size)
    freed, foreign = torch.zeros_like(judged), torch.zeros_like(judged)
    word = torch.zeros_like(full)
    if truth.shadow is not None:
        sound = truth.shadow[-1] == 1
        inside = (full > 0) & (full < truth.shadow.numel() - 1)
        word = torch.where(inside, truth.shadow[torch.where(inside, full, 0)], 0).to(torch.int64)
        freed = sound & inside & (word == FREE)
        foreign = sound & inside & _foreign(full, inside, row, request, at, truth)
        if truth.swa:  # the shadow knows nothing about a page that does not exist
            judged = judged & sound & (inside | (full == 0))
    elif truth.swa:
        assert truth.mapping is not None
        known = (token >= 0) & (token < truth.mapping.numel())
        there = truth.mapping[torch.where(known, token, 0).to(torch.int64)]
        judged = judged & known & (there >= 0)
        word = there // page_size
    page = torch.where(freed, UNKNOWN, word) if truth.swa else full
    evicted = (full > 0) & (word == 0) if truth.swa else torch.zeros_like(judged)
    return Belongs(judged, full, page, freed, foreign, evicted)


def _foreign(
    full: torch.Tensor,
    inside: torch.Tensor,
    row: torch.Tensor,
    request: torch.Tensor,
    at: torch.Tensor,
    truth: Truth,
) -> torch.Tensor:
    """True for each cell whose page was handed out to another row, and is not the cache's."""
    if truth.owners is None or truth.protected is None:
        return torch.zeros_like(inside)
    owner = truth.owners[torch.where(inside, full, 0)].to(torch.int64)
    known = (request > 0) & (request < len(truth.protected))
    begin = truth.protected[torch.where(known, request, 0)].to(torch.int64)
    numbers = request if truth.rows_of is None else truth.rows_of.to(torch.int64)[row]
    return known & (at >= begin) & (owner > 0) & (owner != numbers)
