"""Page tables for the guard's tests, and what is right, counted token by token.

``expected`` is written from the meaning of a page table, in plain Python: which tokens a
query may read, and which page each of them lies in. No formula is shared with the code.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

POISON = -77


@dataclass
class Case:
    """One table and the pool that it must point into; arguments of ``check_page_table``."""

    table: torch.Tensor
    seq_lens: torch.Tensor
    q_lens: torch.Tensor | None
    pages: int
    page_size: int
    window: int

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
        return Case(table, seq_lens, q_lens, self.pages, self.page_size, self.window)


def expected(case: Case) -> tuple[dict[tuple[int, int], int], list[tuple[int, int, int]]]:
    """(cells that a kernel may dereference -> their safe value, sorted bad cells)."""
    safe: dict[tuple[int, int], int] = {}
    bad: list[tuple[int, int, int]] = []
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
            if column in used:
                safe[row, column] = value if in_pool else 0
            if column in seen and not in_pool:
                bad.append((row, column, value))
    return safe, bad


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
