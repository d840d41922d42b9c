"""The rules for a page table: each live cell holds the page that belongs there.

These are pure functions on tensors, and :func:`reference`, which is the guard for CPU tensors. The
Triton kernel in :mod:`g4debug.tracers.page_table.guard` computes the same. A cell (row, column) is
*dereferenced* if ``column < ceil(seq_len / page_size)``. It is *live* if, in a sliding layer, it
also overlaps the window of the row's first query token. Cells behind the row's length are legal
garbage: zeros, or pages of an earlier owner of the row. Page 0 is never handed out (sglang
mem_cache/allocator.py).

Without a :class:`Truth` only ranges are checked. With one, the live cells of a row that belongs to
a request are also compared with ``req_to_token`` and with the events of the allocators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.findings import kinds
from g4debug.sanitizer.reference_state import Truth as Truth
from g4debug.sanitizer.resolve import UNKNOWN, Resolved, resolve_tokens
from g4debug.sanitizer.trap_buffer import CELLS, NO_CELLS, Cells, Record, TrapBuffer

Kind = kinds.PageTableKind


@dataclass(frozen=True)
class TableCheck:
    """The result of :func:`check_page_table`.

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
    seq_lens: integer [rows], for how many tokens of each row KV may be read.
    pages: valid page indices are 0..pages-1.
    window: how many tokens before itself a query token sees (FlashInfer's ``window_left``), -1
        for all.
    q_lens: integer [rows], the number of query tokens of each row, 1 if None.
    truth: the cells must agree with it; None to check ranges alone.
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
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None, :]
    values = table.to(torch.int64)
    dereferenced = column < needed[:, None]
    live = dereferenced & (column >= first_live[:, None])
    kind, expected = torch.zeros_like(values), torch.full_like(values, UNKNOWN)
    repaired = kind.clone()
    if truth is not None and rows and columns:
        judged = live & (lengths > truth.padding)[:, None]
        found = at_pages(truth, row, column, judged, page_size)
        kind, expected, held = verdict(values, found.own_page, found, 1, truth.swa)
        held &= (expected >= 0) & (expected < pages)
        repaired = torch.where(held, expected, repaired)
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


def verdict(
    values: torch.Tensor, right: torch.Tensor, found: Resolved, reserved: int, swa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each cell or entry: its Kind or 0, what belongs there, and whether that is held.

    values, right: what it has, and what ``req_to_token`` says that it must have, UNKNOWN for
    nothing. reserved: the values 0..reserved-1 lie in the reserved page 0.
    """
    kind = torch.where(values != right, int(Kind.MISMATCH), 0)
    kind[(values >= 0) & (values < reserved) & (right != UNKNOWN)] = int(Kind.ZERO)
    if swa:
        kind[(found.page > 0) & (found.own_page == 0)] = int(Kind.EVICTED)
    kind[found.freed] = int(Kind.FREED)
    kind[found.foreign & (kind == 0)] = int(Kind.FOREIGN)
    kind[~found.judged] = 0
    expected = torch.where(found.judged & (kind != int(Kind.FOREIGN)), right, UNKNOWN)
    return kind, expected, found.judged & ~found.freed & (found.own_page > 0)


def at_pages(
    truth: Truth, row: torch.Tensor, column: torch.Tensor, inside: torch.Tensor, page_size: int
) -> Resolved:
    """Resolve the first token of each page: the cells (row, column)."""
    cell = column * (truth.apart or page_size)
    return resolve_tokens(truth, row, cell, 0, column * page_size, inside, page_size)


def reference(
    table: torch.Tensor,
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_q: torch.Tensor | None,
    trap: TrapBuffer,
    mailbox: int,
    pages: int,
    page_size: int,
    window: int,
    truth: Truth | None = None,
    repair: bool = True,
    switched: bool = False,
) -> None:
    """The same as ``guard.launch``, for CPU tensors. Records the first violation in row order."""
    q_lens = None if cu_q is None else cu_q.diff()
    checked = check_page_table(table, seq_lens, pages, page_size, window, q_lens, truth, repair)
    out.copy_(table if switched and not trap.corrects.item() else checked.safe)
    if not len(checked.bad) and not len(checked.short):
        return
    found = torch.cat([checked.bad, checked.kinds[:, None], checked.expected[:, None]], dim=1)
    bad: list[list[int]] = found.tolist()
    for row, needed in checked.short.tolist():
        bad.append([row, table.shape[1], needed, int(Kind.SHORT), UNKNOWN])

    def record(first: list[int], count: int) -> tuple[Record, Cells]:
        row, column, value, kind, right = first
        seen = Record(row, column, value, int(seq_lens[row]), count, kind, right)
        if truth is None or truth.step is None:
            return seen, NO_CELLS
        short = kind == Kind.SHORT
        origin = 0 if short else column // CELLS * CELLS
        values = table[row, origin : origin + CELLS].to(torch.int64)
        columns = origin + torch.arange(len(values))
        judged = (columns >= 0) & (seen.length > truth.padding)
        known = at_pages(truth, torch.full_like(columns, row), columns, judged, page_size)
        _, belongs, _ = verdict(values, known.own_page, known, 1, truth.swa)
        named = UNKNOWN if short else int(known.page[column - origin])
        of = int(truth.req_pool_indices[row])
        seen = seen._replace(step=int(truth.step), request=of, full=named)
        return seen, torch.stack([values, belongs]).to(torch.int32).numpy()

    trap.leave_first(mailbox, sorted(bad), lambda cell: cell[3] == Kind.FOREIGN, record)
