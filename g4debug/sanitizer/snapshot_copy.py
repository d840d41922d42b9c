"""Copies the truth for a forward's page tables: one launch on the forward's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from g4debug import launching

if TYPE_CHECKING:
    from g4debug.ledger.ledger import Ledger

BLOCK = 1024
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (from, to), each contiguous, of one shape


@launching.kernel(tensors=10, numbers=5)
def _copy_kernel(
    source,
    rows,
    first_tokens,
    step_to,
    from_0,
    to_0,
    from_1,
    to_1,
    from_2,
    to_2,
    count,
    step,
    size_0,
    size_1,
    size_2,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    if program < count * blocks:
        row = tl.load(rows + program // blocks).to(tl.int64)
        column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
        # A wrong row is for the check to tell. A copy of it would write to other memory.
        inside = column < tl.where((row >= 0) & (row < ROWS), COLUMNS, 0)
        token = tl.load(source + row * STRIDE + column * PAGE_SIZE, mask=inside, other=0)
        tl.store(first_tokens + row * COLUMNS + column, token.to(tl.int32), mask=inside)
        if program == 0:
            tl.store(step_to, step.to(tl.int64))
    else:
        at = (program - count * blocks) * BLOCK + tl.arange(0, BLOCK)
        if PAIRS > 0:
            tl.store(to_0 + at, tl.load(from_0 + at, mask=at < size_0), mask=at < size_0)
        if PAIRS > 1:
            tl.store(to_1 + at, tl.load(from_1 + at, mask=at < size_1), mask=at < size_1)
        if PAIRS > 2:
            tl.store(to_2 + at, tl.load(from_2 + at, mask=at < size_2), mask=at < size_2)


_launch = launching.Launcher(_copy_kernel)


class Copy:
    """The copy of one forward. All tensors are static.

    first_tokens: int32 [rows of ``req_to_token``, pages], the token index at which each page of a
        row begins. Only the rows of the batch are up to date.
    shadow, owners, protected: as in :mod:`g4debug.ledger`; None if there is no ledger.
    step: int64 [1], the step that the forward belongs to.
    """

    def __init__(self, req_to_token: torch.Tensor, page_size: int, ledger: Ledger | None) -> None:
        rows, tokens = req_to_token.shape
        device = req_to_token.device
        self.source, self.page_size, self.ledger = req_to_token, page_size, ledger
        self.first_tokens = torch.zeros(
            (rows, -(-tokens // page_size)), dtype=torch.int32, device=device
        )
        self.step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self.shadow = self.owners = self.protected = None
        if ledger is not None and ledger.shadow is not None:
            self.shadow = torch.zeros_like(ledger.shadow)
            if ledger.owners is not None and ledger.owners.protected is not None:
                self.owners = torch.zeros_like(ledger.owners.pages)
                self.protected = torch.zeros_like(ledger.owners.protected)

    def make(self, rows: torch.Tensor, step: int) -> None:
        """Copy the truth of this moment for these rows of ``req_to_token``. Waits for nothing.

        rows: integer [n], on the device of ``req_to_token``.
        """
        copy = launch if self.source.is_cuda else reference
        copy(self, rows, step, self._pairs())

    def _pairs(self) -> Pairs:
        """The books to copy as a whole. The copy of a book that the ledger lost becomes void."""
        ledger = self.ledger
        if ledger is None or self.shadow is None:
            return []
        if ledger.shadow is None or ledger.shadow.shape != self.shadow.shape:
            self.shadow[-1:].fill_(0)  # nothing can be concluded from it
            return []
        found, owners = [(ledger.shadow, self.shadow)], ledger.owners
        if self.owners is None or self.protected is None:
            return found
        if owners is None or owners.protected is None:
            self.owners.fill_(0)
            return found
        pairs = [*found, (owners.pages, self.owners), (owners.protected, self.protected)]
        for begin, end in pairs:  # the kernel writes as much as there is to copy
            assert begin.shape == end.shape, f"{tuple(begin.shape)} into {tuple(end.shape)}"
        return pairs


def launch(copy: Copy, rows: torch.Tensor, step: int, pairs: Pairs) -> None:
    """The same as :func:`reference`, in one launch on the current stream."""
    source, columns, count = copy.source, copy.first_tokens.shape[1], rows.numel()
    if source.stride(1) != 1:
        reference(copy, rows, step, pairs)
        return
    padded = [*pairs, *[(copy.step, copy.step)] * (3 - len(pairs))]
    sizes = [begin.numel() for begin, _ in pairs]
    grid = count * -(-columns // BLOCK) - (-max(sizes, default=0) // BLOCK)
    _launch(
        (grid, 1, 1),
        (
            source,
            rows.contiguous(),
            copy.first_tokens,
            copy.step,
            *(tensor for pair in padded for tensor in pair),
        ),
        (count, step, *(begin.numel() for begin, _ in padded)),
        (len(source), columns, source.stride(0), copy.page_size, len(pairs), BLOCK),
    )


def reference(copy: Copy, rows: torch.Tensor, step: int, pairs: Pairs) -> None:
    """In torch: copy these rows' first tokens, the step, and each of ``pairs``."""
    rows = rows.to(torch.int64)
    rows = rows[(rows >= 0) & (rows < len(copy.source))]  # a wrong one is for the check to tell
    copy.first_tokens[rows] = copy.source[:, :: copy.page_size][rows].to(torch.int32)
    copy.step.fill_(step)
    for begin, end in pairs:
        end.copy_(begin)
