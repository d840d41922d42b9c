"""What must hold for lists of tokens: each entry is the token that belongs there.

Some attention backends (triton, flashinfer) hand no page table to their kernels, but one list of
token indices for each row, all in one tensor. Row r has n tokens. In a full layer all of them are
listed. In a sliding layer the last ``window`` are, so that the list begins at position s::

    listed = min(n, window)                    n in a full layer
    s      = n - listed
    begin  = listed of all rows before r       and kv_indptr[r] must be that
    entry i of the row is kv_indices[begin + i], the KV slot of the token at position s + i
    column = (s + i) // page_size              the page of the request that the token lies in
    right  = page * page_size + (s + i) % page_size

``page`` is what belongs in the cell (r, column) of a page table, so all that
:mod:`g4debug.tracers.page_table.check` knows of pages holds here. Every entry is live: the first
query of a row sees all that is listed.

These are pure functions on tensors. The Triton kernel in
:mod:`g4debug.tracers.page_table.token_guard` computes the same. Both know the rows' lists from the
lengths and not from ``kv_indptr``, so a broken ``kv_indptr`` cannot lead them out of the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.backends.handed_over import TokenLists
from g4debug.tracers.page_table.check import UNKNOWN, Kind, Truth, belongs


@dataclass(frozen=True)
class ListCheck:
    """What :func:`check_token_lists` found. Nothing is changed by it.

    bad: int64 [n, 5], (row, entry of the row's list, value, Kind, what belongs there or UNKNOWN) of
        each bad entry, by row and entry. full: int64 [n], the page of the full pool that
        ``req_to_token`` names for each of them, UNKNOWN if it is not known.
    at: int64 [n], where each of them is in ``indices``. safe: int64 [n], what the kernel may get
        instead: the token that belongs there if it is in range and held, else token 0.
    wrong: int64 [m, 5], (row, index, value, Kind, what belongs there) of each word that is wrong
        beside the entries. Of INDPTR, the index is that of ``indptr``. Of SHORT it is the size of
        the list, and the value how many entries would be needed. Else it is the row.
    begins, starts, listed: int64 [rows], see the module.
    """

    bad: torch.Tensor
    full: torch.Tensor
    at: torch.Tensor
    safe: torch.Tensor
    wrong: torch.Tensor
    begins: torch.Tensor
    starts: torch.Tensor
    listed: torch.Tensor


def extents(lists: TokenLists) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, entries, position of the first entry, place of the first entry) of each row."""
    n = (lists.lengths[: lists.rows].to(torch.int64) + lists.extra).clamp(min=0)
    listed = n.clamp(max=lists.window) if lists.window >= 0 else n
    return n, listed, n - listed, listed.cumsum(0) - listed


def check_token_lists(
    lists: TokenLists, tokens: int, page_size: int, truth: Truth | None = None
) -> ListCheck:
    """Check the lists against one pool.

    tokens: valid token indices are 0..tokens-1.
    page_size: of the allocator. truth: what the entries must agree with, None to check ranges.
    """
    n, listed, starts, begins = extents(lists)
    size, device = lists.indices.shape[0], lists.indices.device
    # What the list is too short for is said once for the row.
    there = torch.minimum(listed, (size - begins).clamp(min=0))
    row = torch.repeat_interleave(torch.arange(lists.rows, device=device), there)
    at = torch.arange(len(row), device=device)
    entry = at - begins[row]
    values = lists.indices[at].to(torch.int64)
    position = starts[row] + entry
    kind, right = torch.zeros_like(values), torch.full_like(values, UNKNOWN)
    full, safe = right.clone(), torch.zeros_like(values)
    if truth is not None and len(values):
        found = belongs(row, position // page_size, n[row] > truth.padding, page_size, truth)
        token = found.page * page_size + position % page_size
        token = torch.where(found.page == UNKNOWN, UNKNOWN, token)
        reserved = (values >= 0) & (values < page_size)  # page 0
        kind[values != token] = int(Kind.MISMATCH)
        kind[reserved & (token != UNKNOWN)] = int(Kind.ZERO)
        kind = found.kinds(kind)
        right, full = found.expected(kind, token), torch.where(found.judged, found.full, UNKNOWN)
        held = found.judged & ~found.freed & (found.page > 0) & (right >= 0) & (right < tokens)
        safe = torch.where(held, right, safe)
    kind[values < 0] = int(Kind.NEGATIVE)
    kind[values >= tokens] = int(Kind.RANGE)
    bad = kind > 0
    return ListCheck(
        bad=torch.stack([row, entry, values, kind, right], dim=1)[bad],
        full=full[bad],
        at=at[bad],
        safe=safe[bad],
        wrong=_wrong(lists, n, listed, starts, begins),
        begins=begins,
        starts=starts,
        listed=listed,
    )


def _wrong(
    lists: TokenLists,
    n: torch.Tensor,
    listed: torch.Tensor,
    starts: torch.Tensor,
    begins: torch.Tensor,
) -> torch.Tensor:
    rows, size = lists.rows, lists.indices.shape[0]
    row, ends, found = torch.arange(rows, device=n.device), begins + listed, []

    def add(
        bad: torch.Tensor, at: torch.Tensor, got: torch.Tensor, kind: Kind, right: torch.Tensor
    ) -> None:
        columns = (row, at, got.to(torch.int64), torch.full_like(row, int(kind)), right)
        found.append(torch.stack(columns, dim=1)[bad])

    zero = torch.zeros_like(row)
    first = lists.indptr[:1].to(torch.int64).expand(rows)
    add((row == 0) & (first != 0), zero, first, Kind.INDPTR, zero)
    stops = lists.indptr[1 : rows + 1].to(torch.int64)
    add(stops != ends, row + 1, stops, Kind.INDPTR, ends)
    add(ends > size, zero + size, ends, Kind.SHORT, zero + UNKNOWN)
    if lists.splits is not None:
        splits = lists.splits[:rows]
        outside = (splits < 1) | (splits > lists.max_splits)
        add((n > 0) & outside, row, splits, Kind.SPLITS, zero + lists.max_splits)
    if lists.offsets is not None:
        offsets = lists.offsets[:rows]
        add(offsets != starts, row, offsets, Kind.OFFSET, starts)
    if lists.mask_starts is not None:
        needs = lists.queries * (n + lists.queries)
        right = needs.cumsum(0) - needs
        begin = lists.mask_starts[:rows].to(torch.int64)
        add((begin != right) | (right + needs > lists.mask_size), row, begin, Kind.MASK, right)
    return torch.cat(found) if found else torch.zeros(0, 5, dtype=torch.int64)
