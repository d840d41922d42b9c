"""Page tables for the guard's tests, and the right verdicts, counted token by token.

``expected`` is written from the meaning of a page table, in plain Python: which tokens a
query may read, and which page each of them lies in. No formula is shared with the code.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch

from g4debug.ledger.owners import EVERYTHING, both, place
from g4debug.tracers.page_table.check import Kind, Truth

POISON = -77
UNKNOWN = both(EVERYTHING, EVERYTHING)


@dataclass
class Case:
    """One table and the pool that it must point into; arguments of ``check_page_table``."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    q_lens: torch.Tensor | None
    pages: int
    page_size: int
    window: int
    truth: Truth | None = None

    @property
    def cu_q(self) -> torch.Tensor | None:
        """Running sum of the query lengths, as FlashInfer takes it."""
        if self.q_lens is None:
            return None
        return torch.nn.functional.pad(self.q_lens.cumsum(0), (1, 0)).to(self.q_lens.dtype)

    def to(self, device: str) -> Case:
        """On another device, with the strides kept."""
        table = torch.empty_strided(
            self.table.shape, self.table.stride(), dtype=self.table.dtype, device=device
        )
        table.copy_(self.table)
        q_lens = None if self.q_lens is None else self.q_lens.to(device)
        seq_lens = self.seq_lens.to(device)
        truth = None
        if self.truth is not None:
            tensors = {
                f.name: value.to(device)
                for f in dataclasses.fields(Truth)
                if isinstance(value := getattr(self.truth, f.name), torch.Tensor)
            }
            truth = dataclasses.replace(self.truth, **tensors)
        return Case(table, seq_lens, q_lens, self.pages, self.page_size, self.window, truth)


# (row, column, value, kind, page that belongs there)
Bad = tuple[int, int, int, int, int]


def expected(case: Case) -> tuple[dict[tuple[int, int], int], list[Bad], list[tuple[int, int]]]:
    """(dereferenced cells -> their safe value, sorted bad cells, rows that are too short)."""
    safe: dict[tuple[int, int], int] = {}
    bad: list[Bad] = []
    short: list[tuple[int, int]] = []
    values, columns = case.table.tolist(), case.table.shape[1]
    for row, tokens in enumerate(case.seq_lens.tolist()):
        queries = 1 if case.q_lens is None else int(case.q_lens[row])
        first_query = tokens - queries
        oldest = 0 if case.window < 0 else max(0, first_query - case.window)
        used = {t // case.page_size for t in range(tokens)}
        seen = {t // case.page_size for t in range(oldest, tokens)}
        for column in range(columns):
            value = values[row][column]
            in_pool = value in range(case.pages)
            kind, right, repair = 0, -1, 0
            if column in seen:
                kind, right, repair = judge(case, row, column, value, tokens)
                if not in_pool:
                    kind = Kind.NEGATIVE if value < 0 else Kind.RANGE
            if column in used:
                safe[row, column] = repair if kind else value if in_pool else 0
            if kind:
                bad.append((row, column, value, int(kind), right))
        if columns and len(used) > columns:
            short.append((row, len(used)))
    return safe, bad, short


def judge(case: Case, row: int, column: int, value: int, tokens: int) -> tuple[int, int, int]:
    """(kind or 0, page that belongs there or -1, page that the kernel gets instead)."""
    truth = case.truth
    if truth is None or tokens <= truth.padding:
        return 0, -1, 0
    request, at = int(truth.req_pool_indices[row]), column * case.page_size
    word = column if truth.step is not None else at
    if not 0 < request < len(truth.req_to_token) or word >= truth.req_to_token.shape[1]:
        return 0, -1, 0
    token = int(truth.req_to_token[request, word])
    full = token // case.page_size if token >= 0 else -1
    state = "no shadow"
    if truth.shadow is not None:
        words = truth.shadow.tolist()
        exists = 0 < full < len(words) - 1
        if words[-1] != 1:
            state = "void"
        elif exists:
            state = "free" if words[full] == -1 else "held"
        else:
            state = "reserved" if full == 0 else "beyond"
    if truth.swa:
        if state in ("void", "beyond"):
            return 0, -1, 0
        if state == "free":
            return Kind.FREED, -1, 0
        if state == "no shadow":
            if not 0 <= token < len(truth.mapping) or int(truth.mapping[token]) < 0:
                return 0, -1, 0
            right = int(truth.mapping[token]) // case.page_size
        else:
            right = words[full] if state == "held" else 0
        if full > 0 and right == 0:
            return Kind.EVICTED, 0, 0
    else:
        right = full
        if state == "free":
            return Kind.FREED, right, 0
    kind = 0
    if value == 0 and right != -1:
        kind = Kind.ZERO
    elif value != right:
        kind = Kind.MISMATCH
    elif state == "held" and someone_elses(truth, request, full, at, case.page_size):
        return Kind.FOREIGN, -1, value  # it stays where it is
    return kind, right, right if right in range(1, case.pages) else 0


def someone_elses(truth: Truth, request: int, page: int, at: int, size: int) -> bool:
    """The page was handed out for another column; or to another row, and was not lent."""
    if truth.owners is None:
        return False
    lent, word = int(truth.protected[request]) >> 32, int(truth.owners[page])
    if word == 0 or lent == EVERYTHING:
        return False
    row, column = word >> 32, word % 2**32 - 1
    return column != at // size or (row != request and at >= lent)


def launched(case: Case, step: int = 7) -> Case:
    """The same, compared with a copy that was made when its forward was launched."""
    first = case.truth.req_to_token[:, :: case.page_size].contiguous()
    truth = dataclasses.replace(
        case.truth, req_to_token=first, apart=1, step=torch.tensor([step]), mapping=None
    )
    return dataclasses.replace(case, truth=truth)


LAYOUTS = ("contiguous", "strided", "transposed", "offset")


def lay_out(table: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    rows, columns = table.shape
    if layout == "contiguous":
        return table.contiguous()
    if layout == "strided":  # every other column and row of something bigger
        wide = torch.full((2 * rows, 3 * columns), POISON, dtype=table.dtype)
        view = wide[::2, ::3]
    elif layout == "transposed":
        view = torch.full((columns, rows), POISON, dtype=table.dtype).T
    else:  # a slice out of the middle of a bigger table, as SGLang's static buffers are
        view = torch.full((rows + 2, columns + 5), POISON, dtype=table.dtype)[1:-1, 3:-2]
    view.copy_(table)
    return view


def random_case(rng: random.Random, rows: int, columns: int, bad: float = 0.05) -> Case:
    """A table with about ``bad`` of its cells out of range, of any layout and type."""
    page_size = rng.choice((1, 4, 16, 64))
    pages = rng.choice((1, 2, 50, 10_000))
    limit = (columns + 2) * page_size  # a row may be longer than the table
    edges = (0, 1, page_size, page_size * max(columns - 1, 0), columns * page_size, limit)
    lengths = [rng.choice((rng.choice(edges), rng.randint(0, limit))) for _ in range(rows)]
    dtype = rng.choice((torch.int32, torch.int64))
    wild = [-1, pages, pages + 1, 10_000_000, -(2**31), 2**31 - 1]
    if dtype == torch.int64:
        wild += [2**40, -(2**40)]
    cells = [
        [rng.choice(wild) if rng.random() < bad else rng.randrange(pages) for _ in range(columns)]
        for _ in range(rows)
    ]
    table = torch.tensor(cells, dtype=dtype).reshape(rows, columns)
    queries = None
    if rng.random() < 0.5:
        queries = torch.tensor(
            [rng.randint(1, max(1, min(n, rng.choice((1, 4, 600))))) for n in lengths],
            dtype=rng.choice((torch.int32, torch.int64)),
        )
    return Case(
        lay_out(table, rng.choice(LAYOUTS)),
        torch.tensor(lengths, dtype=rng.choice((torch.int32, torch.int64))),
        queries,
        pages,
        page_size,
        rng.choice((-1, -1, 0, 1, page_size - 1, page_size, 3 * page_size + 1, 10**6)),
    )


def truthful(rng: random.Random, rows: int, columns: int, bad: float = 0.1) -> Case:
    """Tables of requests as SGLang builds them, then spoilt in all ways: cells, books, lengths."""
    case = random_case(rng, rows, columns, bad=0.0)
    page_size, swa = case.page_size, rng.random() < 0.5
    full_pages, tokens = rng.choice((3, 60, 2000)), max(1, columns * page_size - rng.randrange(2))
    pages = rng.choice((2, 40)) if swa else full_pages
    dirty = rng.random() < 0.7  # else everything agrees

    def spoil(right: int, *wrong: int) -> int:
        return rng.choice(wrong) if dirty and rng.random() < bad else right

    requests = 2 * rows + 2
    of = [rng.randrange(1, full_pages) for _ in range(requests * (columns + 1))]
    words = [spoil(rng.randrange(1, pages), 0, -1) for _ in range(full_pages)]
    words[0] = -1
    to_token = [
        [
            spoil(of[s * (columns + 1) + t // page_size] * page_size + t % page_size, 0, -1, 10**8)
            for t in range(tokens)
        ]
        for s in range(requests)
    ]
    mapping = [
        max(words[p], 0) * page_size + i for p in range(full_pages) for i in range(page_size)
    ]
    mapping = [spoil(m, 0, -1) for m in mapping]
    indices = [spoil(rng.randrange(1, requests), 0, -3, requests) for _ in range(rows)]
    shadow = rng.random() < 0.7
    cells = []
    for row in range(rows):
        line = []
        for column in range(columns):
            request = min(max(indices[row], 0), requests - 1)
            at = min(column * page_size, tokens - 1)
            page = to_token[request][at] // page_size
            if swa:
                page = max(words[page], 0) if 0 <= page < full_pages else 0
            line.append(spoil(page, page + 1, 0, -1, pages, 10**6, rng.randrange(pages)))
        cells.append(line)
    table = torch.tensor(cells, dtype=case.table.dtype).reshape(rows, columns)
    void = dirty and rng.random() < 0.1
    # Pages may be drawn for several rows: each is its last one's, or nobody's.
    owner_of = [0] * (full_pages + 1)
    for request in range(1, requests):
        for at in range(0, tokens, page_size):
            page = to_token[request][at] // page_size
            if 0 < page < full_pages:
                column = spoil(at // page_size, at // page_size + 1, 0)
                whose = spoil(request, rng.randrange(1, requests))
                owner_of[page] = spoil(place(whose, column), 0)
    owned = shadow and rng.random() < 0.6
    truth = Truth(
        req_to_token=torch.tensor(to_token, dtype=torch.int32).reshape(requests, tokens),
        req_pool_indices=torch.tensor(indices, dtype=rng.choice((torch.int32, torch.int64))),
        swa=swa,
        shadow=torch.tensor([*words, 0 if void else 1], dtype=torch.int32) if shadow else None,
        mapping=torch.tensor(mapping) if swa and not shadow else None,
        owners=torch.tensor(owner_of) if owned else None,
        protected=torch.tensor(
            [
                rng.choice((both(0, 0), both(0, page_size), both(page_size, page_size), UNKNOWN))
                for _ in range(requests)
            ]
        )
        if owned
        else None,
        padding=rng.choice((0, 0, 1, page_size)),
    )
    return dataclasses.replace(
        case, table=lay_out(table, rng.choice(LAYOUTS)), pages=pages, truth=truth
    )
