"""The rules for lists of tokens: each entry is the token that belongs there.

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

These are pure functions on tensors, and :func:`reference`, which is the guard for CPU tensors. The
Triton kernel in :mod:`g4debug.tracers.page_table.token_guard` computes the same. Both know the
rows' lists from the lengths and not from ``kv_indptr``, so a broken ``kv_indptr`` cannot lead them
out of the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from g4debug.backends.handed_over import TokenLists
from g4debug.sanitizer.resolve import UNKNOWN, Resolved
from g4debug.sanitizer.trap_buffer import CELLS, Cells, Record, TrapBuffer
from g4debug.tracers.page_table import token_ranges
from g4debug.tracers.page_table.check import Kind, Truth, at_pages, verdict


class Repair(IntEnum):
    """How much the guard changes. A word that has no right value (MASK) is made harmless.

    RANGES is for ``watch``: entries that are no token of the pool become token 0, and of the words
    only those change by which a kernel would leave its memory
    (:mod:`g4debug.tracers.page_table.token_ranges`). Nothing does if ``TrapBuffer.corrects`` is 0.
    """

    RANGES = -1
    NOTHING = 0
    UNSAFE = 1  # entries and words that would make a kernel read outside of what it may read
    ALL = 2  # all that is wrong, but not what is only suspected


@dataclass(frozen=True)
class ListCheck:
    """The result of :func:`check_token_lists`, which changes nothing.

    bad: int64 [n, 5], (row, entry of the row's list, value, Kind, right value or UNKNOWN) of each
        bad entry, by row and entry. full: int64 [n], the page of the full pool that
        ``req_to_token`` names for each of them, UNKNOWN if it is not known.
    at: int64 [n], where each of them is in ``indices``. safe: int64 [n], what the kernel may get
        instead: the token that belongs there if it is in range and held, else token 0.
    wrong: int64 [m, 5], (row, index, value, Kind, right value) of each word that is wrong beside
        the entries. The index points into ``indptr`` for INDPTR. For SHORT it is the size of the
        list, and the value is how many entries are needed. Else it is the row.
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
    # Entries that the list is too short for are reported once for the row.
    there = torch.minimum(listed, (size - begins).clamp(min=0))
    row = torch.repeat_interleave(torch.arange(lists.rows, device=device), there)
    at = torch.arange(len(row), device=device)
    entry = at - begins[row]
    values = lists.indices[at].to(torch.int64)
    position = starts[row] + entry
    kind, right = torch.zeros_like(values), torch.full_like(values, UNKNOWN)
    full, safe = right.clone(), torch.zeros_like(values)
    if truth is not None and len(values):
        found, token = at_tokens(truth, row, position, n[row] > truth.padding, page_size)
        kind, right, held = verdict(values, token, found, page_size, truth.swa)
        full = torch.where(found.judged, found.page, UNKNOWN)
        safe = torch.where(held & (right >= 0) & (right < tokens), right, safe)
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


def at_tokens(
    truth: Truth, row: torch.Tensor, position: torch.Tensor, judged: torch.Tensor, page_size: int
) -> tuple[Resolved, torch.Tensor]:
    """Resolve the tokens at these positions of the rows: (they, what has to be listed)."""
    found = at_pages(truth, row, position // page_size, judged, page_size)
    token = found.own_page * page_size + position % page_size
    return found, torch.where(found.own_page == UNKNOWN, UNKNOWN, token)


def reference(
    lists: TokenLists,
    trap: TrapBuffer,
    mailbox: int,
    tokens: int,
    page_size: int,
    truth: Truth | None = None,
    repair: Repair = Repair.UNSAFE,
) -> None:
    """The same as ``token_guard.launch``, for CPU tensors. Records the first one in row order."""
    if lists.rows <= 0:
        return
    found = check_token_lists(lists, tokens, page_size, truth)
    wrong: list[list[int]] = found.wrong.tolist()
    bad = list(zip(found.bad.tolist(), found.full.tolist(), strict=True))
    before = lists.indices.to(torch.int64, copy=True) if bad else lists.indices
    if repair is Repair.RANGES and not trap.corrects.item():
        repair = Repair.NOTHING
    mend(lists, found, tokens, repair)

    def record(seen: list[int], count: int, full: int = UNKNOWN) -> Record:
        row, at, value, kind, right = seen
        left = Record(
            row, at, value, int(found.listed[row] + found.starts[row]), count, kind, right
        )
        if truth is None or truth.step is None or int(truth.step) < 0:
            return left
        of = int(truth.req_pool_indices[row])
        return left._replace(step=int(truth.step), request=of, full=full)

    def entry(first: tuple[list[int], int], count: int) -> tuple[Record, Cells]:
        left = record(first[0], count, first[1])
        row, origin = left.row, left.at // CELLS * CELLS
        begin = int(found.begins[row])
        end = min(begin + int(found.listed[row]), len(before))
        values = before[begin + origin : min(begin + origin + CELLS, end)]
        right = torch.full_like(values, UNKNOWN)
        if truth is not None:
            position = int(found.starts[row]) + origin + torch.arange(len(values))
            judged = torch.full_like(position, left.length > truth.padding, dtype=torch.bool)
            rows = torch.full_like(position, row)
            known, token = at_tokens(truth, rows, position, judged, page_size)
            _, right, _ = verdict(values, token, known, page_size, truth.swa)
        return left, torch.stack([values, right]).to(torch.int32).numpy()

    if wrong:
        first = min(wrong, key=lambda word: (word[0], word[3] != Kind.SHORT))
        trap.leave(mailbox, record(first, len(wrong)))
    trap.leave_first(mailbox, bad, lambda one: one[0][3] == Kind.FOREIGN, entry)


def mend(lists: TokenLists, found: ListCheck, tokens: int, repair: Repair) -> None:
    """Change the lists as far as ``repair`` allows."""
    if repair is Repair.RANGES:
        bad = found.at[(found.bad[:, 2] < 0) | (found.bad[:, 2] >= tokens)]
        lists.indices[bad] = 0
        token_ranges.mend(lists, found.begins, found.listed, found.starts, tokens)
        return
    if repair is Repair.NOTHING:
        return
    kinds, values = found.bad[:, 3], found.bad[:, 2]
    replaced = kinds != int(Kind.FOREIGN)
    if repair is Repair.UNSAFE:
        replaced = (values < 0) | (values >= tokens)
    lists.indices[found.at[replaced]] = found.safe[replaced].to(lists.indices.dtype)
    size = lists.indices.shape[0]
    n = found.starts + found.listed
    for row, at, got, kind, right in found.wrong.tolist():
        if kind == Kind.INDPTR:
            lists.indptr[at] = min(right, size)
        elif kind == Kind.SHORT:
            lists.indptr[row + 1] = size
        elif kind == Kind.SPLITS and lists.splits is not None:
            lists.splits[row] = 1 if got < 1 else lists.max_splits
        elif kind == Kind.OFFSET and lists.offsets is not None:
            lists.offsets[row] = right
        elif kind == Kind.MASK and lists.mask_starts is not None:
            needs = lists.queries * (int(n[row]) + lists.queries)
            unsafe = got < 0 or got + needs > lists.mask_size
            if unsafe or repair is Repair.ALL:
                lists.mask_starts[row] = 0 if right + needs > lists.mask_size else right
