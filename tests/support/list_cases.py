"""Lists of tokens for the guard's tests, and the right verdicts, counted token by token.

``expected`` is written from the meaning of the lists, in plain Python. ``guard_cases.judge`` tells
the verdict on a page.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch
from guard_cases import Case, judge, launched, truthful

from g4debug.backends.handed_over import TokenLists
from g4debug.tracers.page_table.check import Kind, Truth

# (row, entry or index, value, kind, what belongs there)
Bad = tuple[int, int, int, int, int]


@dataclass
class ListCase:
    lists: TokenLists
    tokens: int
    page_size: int
    truth: Truth | None

    def copy(self, device: str = "cpu") -> ListCase:
        """The same in memory of its own: the guard changes it."""

        def fresh(of):
            tensors = {
                f.name: value.clone().to(device)
                for f in dataclasses.fields(of)
                if isinstance(value := getattr(of, f.name), torch.Tensor)
            }
            return dataclasses.replace(of, **tensors)

        truth = None if self.truth is None else fresh(self.truth)
        return dataclasses.replace(self, lists=fresh(self.lists), truth=truth)


def rows_of(case: ListCase) -> list[tuple[int, int, int]]:
    """(tokens, position of the first entry, place of the first entry) of each row."""
    found, begin, lists = [], 0, case.lists
    for n in lists.lengths.tolist()[: lists.rows]:
        tokens = max(n + lists.extra, 0)
        first = max(tokens - lists.window, 0) if lists.window >= 0 else 0
        found.append((tokens, first, begin))
        begin += tokens - first
    return found


def expected(case: ListCase) -> tuple[list[Bad], list[Bad]]:
    """(bad entries, bad words)."""
    bad, words, lists, mask = [], [], case.lists, 0
    indices, indptr = lists.indices.tolist(), lists.indptr.tolist()
    if lists.rows and indptr[0] != 0:
        words.append((0, 0, indptr[0], int(Kind.INDPTR), 0))
    for row, (tokens, first, begin) in enumerate(rows_of(case)):
        for entry, position in enumerate(range(first, tokens)):
            if begin + entry < len(indices):
                value = indices[begin + entry]
                kind, right = entry_is(case, row, position, value, tokens)
                if kind:
                    bad.append((row, entry, value, int(kind), right))
        end = begin + tokens - first
        if indptr[row + 1] != end:
            words.append((row, row + 1, indptr[row + 1], int(Kind.INDPTR), end))
        if end > len(indices):
            words.append((row, len(indices), end, int(Kind.SHORT), -1))
        if lists.splits is not None and tokens:
            splits = int(lists.splits[row])
            if splits not in range(1, lists.max_splits + 1):
                words.append((row, row, splits, int(Kind.SPLITS), lists.max_splits))
        if lists.offsets is not None and int(lists.offsets[row]) != first:
            words.append((row, row, int(lists.offsets[row]), int(Kind.OFFSET), first))
        if lists.mask_starts is not None:
            needs, start = lists.queries * (tokens + lists.queries), int(lists.mask_starts[row])
            if start != mask or mask + needs > lists.mask_size:
                words.append((row, row, start, int(Kind.MASK), mask))
            mask += needs
    return bad, words


def entry_is(case: ListCase, row: int, position: int, value: int, tokens: int) -> tuple[int, int]:
    """(kind or 0, the token that belongs there or -1)."""
    size, kind, right = case.page_size, 0, -1
    column, inner = divmod(position, size)
    pages = Case(torch.empty(0, 0), case.lists.lengths, None, case.tokens // size, size, -1)
    pages.truth = case.truth
    nobody = -5  # no page: of a cell that is judged, judge says what belongs there
    page_kind, page, _ = judge(pages, row, column, nobody, tokens)
    if page_kind:
        right = page * size + inner if page != -1 else -1
        if page_kind != Kind.MISMATCH:
            kind = page_kind
        elif value in range(size) and page != -1:
            kind = Kind.ZERO
        elif value != right:
            kind = Kind.MISMATCH
        elif page > 0 and judge(pages, row, column, page, tokens)[0] == Kind.FOREIGN:
            kind, right = Kind.FOREIGN, -1
    if value not in range(case.tokens):
        kind = Kind.NEGATIVE if value < 0 else Kind.RANGE
    return int(kind), right


def list_case(rng: random.Random, rows: int, columns: int, bad: float = 0.03) -> ListCase:
    """Lists of which most entries are right, with a truth, all layouts, some words broken."""
    of = truthful(rng, rows, columns, bad)
    truth, size = of.truth, of.page_size
    if rng.random() < 0.4 and not (truth.swa and truth.shadow is None):
        truth = launched(of).truth
    if rng.random() < 0.1:
        truth = None
    extra = rng.choice((0, 0, 2))
    window = rng.choice((-1, 0, 1, 7, 3 * size))
    lengths = torch.tensor(
        [max(n - extra, 0) for n in of.seq_lens.tolist()],
        dtype=rng.choice((torch.int32, torch.int64)),
    )
    lists = TokenLists(
        torch.zeros(0, dtype=torch.int64), torch.zeros(rows + 1), lengths, extra, window
    )
    case = ListCase(lists, of.pages * size, size, truth)
    entries, ends, starts, masks, queries = [], [0], [], [0], rng.choice((1, 4))
    for row, (tokens, first, _) in enumerate(rows_of(case)):
        for position in range(first, tokens):
            _, right = entry_is(case, row, position, -(10**6), tokens)
            value = right if right >= 0 else rng.randrange(case.tokens)
            if rng.random() < bad:
                wild = (-1, case.tokens, 10**8, 0, value + 1, rng.randrange(case.tokens))
                value = rng.choice(wild)
            entries.append(value)
        starts.append(first)
        ends.append(ends[-1] + tokens - first)
        masks.append(masks[-1] + queries * (tokens + queries))

    def broken(values, by):
        return [v + rng.choice(by) if rng.random() < bad else v for v in values]

    short = rng.random() < bad
    spare = 0 if short else rng.choice((0, 5))
    entries = entries[:-1] if short else entries + [10**8] * spare
    splits = broken([rng.randint(1, 8) for _ in range(rows)], (-9, 9))
    kind = rng.choice(("decode", "verify", "neither"))
    lists = dataclasses.replace(
        lists,
        indices=torch.tensor(entries, dtype=torch.int64).to(rng.choice((torch.int32, torch.int64))),
        indptr=torch.tensor(broken(ends, (-1, 1, 10**6)), dtype=torch.int32),
        splits=torch.tensor(splits, dtype=torch.int32) if kind == "decode" else None,
        max_splits=8,
        offsets=torch.tensor(broken(starts, (-1, 1))) if kind == "verify" else None,
        mask_starts=torch.tensor(broken(masks[:-1], (-1, 5, 10**6))) if kind == "verify" else None,
        mask_size=masks[-1] - (rng.random() < bad),
        queries=queries,
    )
    return dataclasses.replace(case, lists=lists)
