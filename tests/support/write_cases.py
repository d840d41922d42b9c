"""Forwards for the tests of kv-writes, and their errors, token by token.

``expected`` is written from the meaning of a location, in plain Python. No formula is shared with
the code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from g4debug.ledger.owners import EVERYTHING, both
from g4debug.ledger.owners import place as handed_out_for
from g4debug.sanitizer.reference_state import Truth
from g4debug.tracers.kv_writes.check import Kind, Rows

MODES = ("decode", "verify", "extend")
SUSPICIONS = {kind for kind in Kind if kind.record.suspicion}


@dataclass
class Case:
    """One forward. ``place[i]``: (row, position) of token i."""

    mode: str
    size: int
    slots: int
    swa: bool
    by_page: bool
    loc: torch.Tensor
    rows: Rows
    truth: Truth | None
    place: list[tuple[int, int]] = field(default_factory=list)


def random_case(rng: random.Random) -> Case:
    """A sound forward of some requests, in which then some locations, rows or books are spoilt."""
    mode = rng.choice(MODES)
    size = rng.choice((1, 4, 16))
    requests, columns = rng.randrange(1, 6), rng.randrange(5, 9)
    swa = rng.random() < 0.5
    by_page = rng.random() < 0.5
    captured = mode != "extend" and rng.random() < 0.4
    full_pages = requests * columns + 6
    pages = list(range(1, full_pages))
    rng.shuffle(pages)
    words = columns * size
    table = torch.zeros(requests + 2, words, dtype=torch.int32)
    swa_of = list(range(full_pages))
    rng.shuffle(swa_of)
    shadow = torch.full((full_pages + 1,), -1, dtype=torch.int32)
    shadow[-1] = 1
    owners = torch.zeros(full_pages + 1, dtype=torch.int64)
    numbers = rng.sample(range(1, requests + 2), requests)
    for request in numbers:
        for column in range(columns):
            page = pages.pop()
            at = column * size
            table[request, at : at + size] = torch.arange(page * size, (page + 1) * size)
            shadow[page] = (swa_of[page] or 1) if swa else 0
            owners[page] = rng.choice((0, 1, 1, 1)) * handed_out_for(request, column)
    if swa and rng.random() < 0.3:  # a page that has left the window
        shadow[rng.choice(pages or [1])] = 0
    protected = torch.full((requests + 2,), both(EVERYTHING, EVERYTHING))
    each = {"decode": 1, "verify": rng.randrange(1, 5), "extend": 0}[mode]
    firsts, counts = [], []
    for request in numbers:
        count = each or rng.randrange(1, words)
        first = rng.randrange(0, words - count + 1)
        firsts.append(first)
        counts.append(count)
        if rng.random() < 0.7:
            cached = first // size * size
            protected[request] = both(rng.choice((0, cached)), cached)
    offset = {"decode": -1, "verify": 0, "extend": 0}[mode]
    padding = 1 if captured else 0
    if mode == "decode":
        firsts = [first + 1 for first in firsts]
    indices = list(numbers)
    if captured:  # rows of padding, with a request of before, or none
        for _ in range(rng.randrange(3)):
            indices.append(rng.choice([0, *numbers]))
            firsts.append(1)
            counts.append(each)
    place, loc = [], []
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        for j in range(count):
            position = first + offset + j
            place.append((row, position))
            if row >= len(numbers):
                loc.append(0)
                continue
            full = int(table[indices[row], position])
            word = int(shadow[full // size]) if full else 0
            loc.append(full if not swa else max(word, 0) * size + full % size)
    slots = full_pages * size
    for _ in range(rng.choice((0, 0, 1, 2, 5))):  # what is spoilt
        i = rng.randrange(len(loc))
        what = rng.randrange(7)
        row, position = place[i]
        page = int(table[indices[row], min(position, words - 1)]) // size
        if what == 0:
            loc[i] = rng.choice((-1, -7, slots, slots + 3, 10_000_000))
        elif what == 1:
            loc[i] = loc[rng.randrange(len(loc))]
        elif what == 2:
            loc[i] = rng.randrange(slots)
        elif what == 3:
            shadow[page] = -1
        elif what == 4:
            owners[page] = handed_out_for(rng.randrange(1, requests + 2), rng.randrange(columns))
        elif what == 5:
            until = position + rng.randrange(2)
            protected[indices[row]] = both(rng.choice((0, until)), until)
        else:
            shadow[-1] = rng.randrange(2)
    tensors = {"firsts": torch.tensor(firsts, dtype=rng.choice((torch.int32, torch.int64)))}
    if mode == "extend":
        starts = [sum(counts[:row]) for row in range(len(counts))]
        tensors |= {"starts": torch.tensor(starts, dtype=torch.int32)}
        tensors |= {"counts": torch.tensor(counts, dtype=torch.int32)}
    rows = Rows(len(firsts), max(counts), offset=offset, per_row=each, **tensors)
    truth = Truth(
        table[:, ::size].contiguous() if by_page else table,
        torch.tensor(indices),
        swa=swa,
        shadow=shadow,
        owners=owners,
        protected=protected,
        apart=1 if by_page else 0,
        step=torch.tensor([7]) if by_page else None,
        padding=padding,
    )
    kept = None if rng.random() < 0.1 else truth
    dtype = rng.choice((torch.int32, torch.int64))
    by_page = by_page and size > 1
    return Case(mode, size, slots, swa, by_page, torch.tensor(loc, dtype=dtype), rows, kept, place)


def expected(case: Case) -> dict[int, int]:
    """Token -> Kind, for each token with a bad location."""
    found = {}
    values = case.loc.tolist()
    for i, value in enumerate(values):
        kind = _of_token(case, i, value)
        if kind:
            found[i] = int(kind)
    return found


def _of_token(case: Case, i: int, value: int) -> int:
    if value < 0:
        return Kind.NEGATIVE
    if value >= case.slots:
        return Kind.RANGE
    others = [j for j, v in enumerate(case.loc.tolist()) if v == value and j != i]
    page = value // case.size
    if page > 0 and others:
        return Kind.TWICE
    if case.truth is None:
        return 0
    truth, (row, position) = case.truth, case.place[i]
    request = int(truth.req_pool_indices[row])
    of_request = request > 0
    padded = truth.padding > 0 and int(case.rows.firsts[row]) <= truth.padding
    if not of_request:
        return Kind.PADDING if truth.padding and page else 0
    if case.by_page:
        full = int(truth.req_to_token[request, position // case.size]) + position % case.size
    else:
        full = int(truth.req_to_token[request, position])
    full_page = full // case.size
    sound = int(truth.shadow[-1]) == 1
    word = int(truth.shadow[full_page]) if full_page else 0
    free = word == -1
    known = not case.swa or (sound and not free)
    right = full if not case.swa else max(word, 0) * case.size + full % case.size
    if case.swa and word == 0:
        right = 0
    fine = value == right or (page == 0 and right < case.size)
    if padded:
        return Kind.PADDING if page and not (known and fine) else 0
    if known and not fine:
        return Kind.MISMATCH if page else Kind.ZERO
    if sound and free:
        return Kind.FREED
    if not sound or not full_page:
        return 0
    word, kept = int(truth.owners[full_page]), int(truth.protected[request])
    lent, until = kept >> 32, kept % 2**32
    column = position // case.size
    theirs = word >> 32 != request and column * case.size >= lent
    if word and lent != EVERYTHING and (word % 2**32 - 1 != column or theirs):
        return Kind.FOREIGN
    return Kind.CACHED if until != EVERYTHING and position < until else 0
