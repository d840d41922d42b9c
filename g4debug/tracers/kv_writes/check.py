"""What must hold for the locations that a forward writes KV to: each token has its own place.

These are pure functions on tensors. The Triton kernels in :mod:`g4debug.tracers.kv_writes.kernels`
compute the same. A forward writes ``loc[i]`` for its i-th token. That token is the j-th of its row
r, at position p of the row's request q = req_pool_indices[r]::

    p     = firsts[r] + offset + j        decode: seq_len - 1, verify: seq_len + j,
                                          extend: prefix_len + j
    right = req_to_token[q, p]            or for the SWA pool: the same token's location there

    bad(i) = loc[i] is no slot of the pool, or is not ``right``, or another token of the forward
             has it too, or its page is free, another request's, or the prefix cache's

Each token once: if two tokens of a forward have one location, at most one of them is at its right
place, unless ``req_to_token`` names the place twice. So equality with ``req_to_token`` finds most
of it. The rest, and all of it where there is no truth, is found by comparing the locations with
each other. Slots of page 0, which is never handed out, may be written any number of times: there
go the tokens of padding rows, and those whose SWA page is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4debug.findings import kinds
from g4debug.ledger.owners import EVERYTHING
from g4debug.ledger.shadow import FREE
from g4debug.sanitizer.reference_state import Truth

Kind = kinds.KvWritesKind
UNKNOWN = -1
# Must be confirmed by SGLang's own structures.
SUSPICIONS = tuple(kind for kind in Kind if kind.record.suspicion)


@dataclass(frozen=True)
class Rows:
    """Which token of which row each location of a forward belongs to.

    firsts: integer [>= rows]; the j-th token of row r is at position ``firsts[r] + offset + j``.
        None: not known, so only ranges are checked.
    per_row: how many tokens each row has; 0 if ``starts`` and ``counts`` say it.
    starts, counts: integer [>= rows], index of each row's first token, and how many it has.
    most: tokens of the longest row.
    """

    rows: int
    most: int
    firsts: torch.Tensor | None = None
    offset: int = 0
    per_row: int = 0
    starts: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    def of_tokens(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(row of each of ``n`` tokens, number of the token in its row), int64 [n] each."""
        if self.starts is None or self.counts is None:
            at = torch.arange(n)
            return at // self.per_row, at % self.per_row
        counts = self.counts[: self.rows].to(torch.int64).cpu()
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        starts = self.starts[: self.rows].to(torch.int64).cpu()
        return row, torch.arange(len(row)) - starts[row]


@dataclass(frozen=True)
class WriteCheck:
    """What :func:`check_writes` found. All int64 [tokens], on the CPU, but ``safe``.

    safe: the locations to write to, of the dtype of ``loc``. In place of a location that the pool
        does not have, and with ``repair`` of any other that is certainly wrong, it has the right
        place if that is known and held, else slot 0.
    kinds: the Kind of each location, 0 if nothing is wrong.
    expected: the right place, UNKNOWN if that is not known.
    others: of a TWICE location, another token that has it; else the right place in the full pool,
        UNKNOWN if that is not known.
    rows, positions: of each token; position -1 if it is not known.
    """

    safe: torch.Tensor
    kinds: torch.Tensor
    expected: torch.Tensor
    others: torch.Tensor
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

    loc: int32/int64 [tokens], on the CPU. slots: of the pool, those of page 0 included.
    """
    values, n = loc.to(torch.int64), loc.numel()
    row, number = rows.of_tokens(n)
    outside = (values < 0) | (values >= slots)
    real = ~outside & (values >= page_size)
    kinds, expected = torch.zeros_like(values), torch.full_like(values, UNKNOWN)
    others, held = expected.clone(), torch.zeros_like(real)
    positions = expected.clone()
    if rows.firsts is not None:
        first = rows.firsts.to(torch.int64)[row]
        positions = first + rows.offset + number
        if truth is not None:
            kinds, expected, others, held = _against(
                values, row, first, positions, page_size, truth
            )
        twin = _twins(values, real)
        twice = twin != UNKNOWN
        kinds[twice] = int(Kind.TWICE)
        others = torch.where(twice, twin, others)
    kinds[values >= slots] = int(Kind.RANGE)
    kinds[values < 0] = int(Kind.NEGATIVE)
    known = expected != UNKNOWN
    sound = known & held & (expected > 0) & (expected < slots)
    suspicious = (kinds == int(Kind.FOREIGN)) | (kinds == int(Kind.CACHED))
    replaced = outside.clone()
    if repair:
        replaced |= (kinds > 0) & ~suspicious & (known | (kinds != int(Kind.TWICE)))
    safe = torch.where(replaced, torch.where(sound, expected, 0), values)
    return WriteCheck(safe.to(loc.dtype), kinds, expected, others, row, positions)


def _twins(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """For each token another one with the same location, UNKNOWN if there is none.

    It is the first one with that location, or for that one itself the last.
    """
    n = len(values)
    at = torch.arange(n)
    _, group = torch.unique(torch.where(real, values, -1 - at), return_inverse=True)
    first = torch.full((n,), n).scatter_reduce(0, group, at, "amin")[group]
    last = torch.full((n,), -1).scatter_reduce(0, group, at, "amax")[group]
    return torch.where(first == last, UNKNOWN, torch.where(first == at, last, first))


def _against(
    values: torch.Tensor,
    row: torch.Tensor,
    first: torch.Tensor,
    position: torch.Tensor,
    size: int,
    truth: Truth,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(kind, right place, right place in the full pool, is it held) of each token."""
    requests, words = truth.req_to_token.shape
    request = truth.req_pool_indices.to(torch.int64)[row]
    named = (request > 0) & (request < requests) & (position >= 0)
    apart = truth.apart or 1
    by_page = truth.apart == 1 and size > 1
    cell = position // size if by_page else position * apart
    named &= cell < words
    token = truth.req_to_token[request.clamp(0, requests - 1), cell.clamp(0, words - 1)]
    token = token.to(torch.int64)
    named &= token >= 0
    full = torch.where(named, token + (position % size if by_page else 0), UNKNOWN)
    page = torch.where(named, full // size, 0)
    theirs = named & ((first > truth.padding) | (truth.padding == 0))
    judged, right = named, full
    freed, foreign, cached = (torch.zeros_like(named) for _ in range(3))
    if truth.shadow is not None:
        sound = truth.shadow[-1] == 1
        inside = named & (page > 0) & (page < truth.shadow.numel() - 1)
        word = torch.where(inside, truth.shadow[torch.where(inside, page, 0)].to(torch.int64), 0)
        freed = theirs & sound & inside & (word == FREE)
        if truth.owners is not None and truth.protected is not None:
            owner = truth.owners[torch.where(inside, page, 0)].to(torch.int64)
            begin = truth.protected[request.clamp(0, requests - 1)].to(torch.int64)
            begins = position // size * size
            mine = theirs & sound & inside
            foreign = mine & (owner > 0) & (owner != request) & (begins >= begin)
            cached = mine & (begin != EVERYTHING) & (position < begin)
        if truth.swa:
            judged = named & sound & (word != FREE) & (inside | (page == 0))
            right = torch.where(word > 0, word * size + full % size, 0)
    elif truth.swa:
        assert truth.mapping is not None
        inside = named & (full < truth.mapping.numel())
        mapped = truth.mapping[torch.where(inside, full, 0)].to(torch.int64)
        judged, right = inside & (mapped >= 0), mapped
    right = torch.where(judged, right, UNKNOWN)
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
    return kind, torch.where(theirs, right, UNKNOWN), torch.where(theirs, full, UNKNOWN), ~freed
