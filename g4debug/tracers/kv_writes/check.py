"""The rules for the locations that a forward writes KV to: each token has its own place.

These are pure functions on tensors, and :func:`reference`, which is the check for CPU tensors. The
Triton kernels in :mod:`g4debug.tracers.kv_writes.kernels` compute the same. A forward writes
``loc[i]`` for its i-th token. That token is the j-th of its row r, at position p of the row's
request q = req_pool_indices[r]::

    p     = firsts[r] + offset + j        decode: seq_len - 1, verify: seq_len + j,
                                          extend: prefix_len + j
    right = req_to_token[q, p]            or for the SWA pool: the same token's location there

    bad(i) = loc[i] is no slot of the pool, or is not ``right``, or another token of the forward
             has it too, or its page is free, another request's, or the prefix cache's

A location may be used once: if two tokens of a forward have one location, at most one of them is at
its right place, unless ``req_to_token`` names the place twice. So equality with ``req_to_token``
finds most of these errors. The rest, and all of them where there is no truth, are found by
comparing the locations with each other. Slots of page 0, which is never handed out, may be written
any number of times: they take the tokens of padding rows, and tokens that have no SWA page any
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.findings import kinds
from g4debug.sanitizer.reference_state import Truth
from g4debug.sanitizer.resolve import UNKNOWN, resolve_tokens
from g4debug.sanitizer.trap_buffer import NO_CELLS, Cells, Record, TrapBuffer

Kind = kinds.KvWritesKind


@dataclass(frozen=True)
class Rows:
    """Which token of which row each location of a forward belongs to.

    firsts: integer [>= rows]; the j-th token of row r is at position ``firsts[r] + offset + j``.
        None: not known, so only ranges are checked.
    per_row: how many tokens each row has; 0 if ``starts`` and ``counts`` say it.
    starts, counts: integer [>= rows], index of each row's first token, and how many it has.
    lengths: how many each row has by the host, which laid them one behind the other; () if the
        host does not say it.
    most: tokens of the longest row.
    """

    rows: int
    most: int
    firsts: torch.Tensor | None = None
    offset: int = 0
    per_row: int = 0
    starts: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    lengths: tuple[int, ...] = ()

    def of_tokens(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(row of each of ``n`` tokens, number of the token in its row), int64 [n] each."""
        if self.starts is None or self.counts is None:
            at = torch.arange(n)
            return at // self.per_row, at % self.per_row
        if self.lengths:
            counts = torch.tensor(self.lengths)
            row = torch.repeat_interleave(torch.arange(self.rows), counts)
            return row, torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        counts = self.counts[: self.rows].to(torch.int64).cpu()
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        starts = self.starts[: self.rows].to(torch.int64).cpu()
        return row, torch.arange(len(row)) - starts[row]


@dataclass
class Stamps:
    """The stamps of the stamping kernel, for one pool. ``number`` is the number of the next check.

    slots: int64 [slots of the pool, 2]. number: int64 [1], from 1.
    """

    slots: torch.Tensor
    number: torch.Tensor

    @classmethod
    def new(cls, slots: int, device: torch.device) -> Stamps:
        return cls(
            torch.zeros((slots, 2), dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class WriteCheck:
    """The result of :func:`check_writes`. All int64 [tokens], on the CPU, but ``safe``.

    safe: the locations to write to, of the dtype of ``loc``. In place of a location that the pool
        does not have, and with ``repair`` of any other that is certainly wrong, it has the right
        place if that is known and held, else slot 0. Where the row of ``req_to_token`` itself seems
        to be wrong, the place that it names may be somebody else's: slot 0, too.
    kinds: the Kind of each location, 0 if nothing is wrong.
    expected: the right place, UNKNOWN if that is not known.
    full: the right place in the full pool, UNKNOWN if that is not known.
    twins: of a TWICE location, another token that has it, else UNKNOWN.
    rows, positions: of each token; position -1 if it is not known.
    """

    safe: torch.Tensor
    kinds: torch.Tensor
    expected: torch.Tensor
    full: torch.Tensor
    twins: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor


def check_writes(
    loc: torch.Tensor,
    slots: int,
    page_size: int,
    rows: Rows,
    truth: Truth | None = None,
    repair: bool = True,
) -> WriteCheck:
    """Check the locations that one forward writes in one pool.

    loc: int32/int64 [tokens], on the CPU. slots: how many the pool has, page 0 included.
    """
    values, n = loc.to(torch.int64), loc.numel()
    row, number = rows.of_tokens(n)
    outside = (values < 0) | (values >= slots)
    real = ~outside & (values >= page_size)
    kinds, expected = torch.zeros_like(values), torch.full_like(values, UNKNOWN)
    full, twins, positions = expected.clone(), expected.clone(), expected.clone()
    held = torch.zeros_like(real)
    if rows.firsts is not None:
        first = rows.firsts.to(torch.int64)[row]
        positions = first + rows.offset + number
        if truth is not None:
            kinds, expected, full, held = _verdict(values, row, first, positions, page_size, truth)
        twins = _twins(values, real)
        kinds[twins != UNKNOWN] = int(Kind.TWICE)
    kinds[values >= slots] = int(Kind.RANGE)
    kinds[values < 0] = int(Kind.NEGATIVE)
    known = expected != UNKNOWN
    sound = known & held & (expected > 0) & (expected < slots)
    suspicious = (kinds == int(Kind.FOREIGN)) | (kinds == int(Kind.CACHED))
    replaced = outside.clone()
    if repair:
        replaced |= (kinds > 0) & ~suspicious & (known | (kinds != int(Kind.TWICE)))
    safe = torch.where(replaced, torch.where(sound, expected, 0), values)
    return WriteCheck(safe.to(loc.dtype), kinds, expected, full, twins, row, positions)


def _twins(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """For each token another one with the same location, UNKNOWN if there is none.

    The first token with that location; for the first one itself, the last.
    """
    n = len(values)
    at = torch.arange(n)
    _, group = torch.unique(torch.where(real, values, -1 - at), return_inverse=True)
    first = torch.full((n,), n).scatter_reduce(0, group, at, "amin")[group]
    last = torch.full((n,), -1).scatter_reduce(0, group, at, "amax")[group]
    return torch.where(first == last, UNKNOWN, torch.where(first == at, last, first))


def _verdict(
    values: torch.Tensor,
    row: torch.Tensor,
    first: torch.Tensor,
    position: torch.Tensor,
    size: int,
    truth: Truth,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kind, right place, right place in the full pool, may it be written to) of each token.

    A place is not written to if its page is free, or does not belong into the row there.
    """
    by_page = truth.apart == 1 and size > 1
    cell = position // size if by_page else position * (truth.apart or 1)
    within = position % size if by_page else 0
    found = resolve_tokens(truth, row, cell, within, position, position >= 0, size)
    named = found.place >= 0
    theirs = named & ((first > truth.padding) | (truth.padding == 0))
    judged = found.judged & named & ~(found.freed & truth.swa)
    freed, foreign, cached = (theirs & x for x in (found.freed, found.foreign, found.cached))
    right = torch.where(judged, found.own_place, UNKNOWN)
    in_zero = (values >= 0) & (values < size)
    wrong = judged & (values != right) & ~(in_zero & (right < size))
    kind = torch.zeros_like(values)
    kind[theirs & wrong] = int(Kind.MISMATCH)
    kind[theirs & wrong & in_zero] = int(Kind.ZERO)
    kind[freed & (kind == 0)] = int(Kind.FREED)
    kind[foreign & (kind == 0)] = int(Kind.FOREIGN)
    kind[cached & (kind == 0)] = int(Kind.CACHED)
    if truth.padding > 0:
        kind[~theirs & ~in_zero & ~(judged & ~wrong)] = int(Kind.PADDING)
    full = torch.where(theirs, found.place, UNKNOWN)
    return kind, torch.where(theirs, right, UNKNOWN), full, ~freed & ~foreign


def reference(
    loc: torch.Tensor,
    out: torch.Tensor,
    stamps: Stamps,
    trap: TrapBuffer,
    mailbox: int,
    page_size: int,
    rows: Rows,
    truth: Truth | None = None,
    repair: bool = True,
) -> None:
    """The same as ``kernels.launch``, for CPU tensors. Records the first bad token, by its index.

    Its record counts all bad tokens, while the kernel's counts the bad tokens of one row.
    """
    found = check_writes(loc, stamps.slots.shape[0], page_size, rows, truth, repair)
    out.copy_(found.safe)

    def record(i: int, count: int) -> tuple[Record, Cells]:
        row = int(found.rows[i])
        known = truth is not None and rows.firsts is not None
        seen = Record(
            row=row,
            at=int(found.positions[i]),
            value=int(loc[i]),
            length=0 if rows.firsts is None else int(rows.firsts[row]),
            bad=count,
            kind=int(found.kinds[i]),
            expected=int(found.expected[i]),
            step=-1 if truth is None or truth.step is None else int(truth.step),
            request=int(truth.req_pool_indices[row]) if known and truth is not None else -1,
            full=int(found.full[i]),
            twin=int(found.twins[i]),
        )
        return seen, NO_CELLS

    bad = found.kinds.nonzero().flatten().tolist()
    trap.leave_first(mailbox, bad, lambda i: Kind(int(found.kinds[i])).record.suspicion, record)
