"""Compares the rows of ``req_to_token`` with the prefix cache, in each step.

The first ``cache_protected_len`` tokens of a request lie in pages of the prefix cache. The nodes
from the root to the request's last node have the slots of these tokens, and the request has locked
these nodes. So as long as it runs, its row must have the same slots. Other requests read some of
these pages by right, in the same columns, so only this comparison tells a page that is wrong.

When a request is admitted, or hands more tokens over, its path is summed up on the device, one sum
for each SLICE of tokens. In each step the sums of the row are compared with these there: one
launch, for which nobody waits. Token t has the weight ``weights[t % SLICE]``, which is odd, so a
single wrong slot always changes the sum. The sums are int64 and wrap around.

A kernel writes to pinned memory which rows are wrong. A word that the host clears too early is
written again in the next step, because a wrong row stays wrong.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from g4debug import launching

SLICE = 16384  # tokens that one program of a kernel reads
BLOCK = 4096  # tokens that it reads at once
IN_FLIGHT = 2  # steps of which the result is not processed yet; SGLang has no more
_ODD = 0x9E3779B1  # of Fibonacci hashing (Knuth, TAOCP 3, 6.4)


@triton.jit
def _sum(slots, weights, first, count, SLICE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the slice that begins with token ``first`` of ``count`` tokens."""
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for begin in range(0, SLICE, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = first + at < count
        slot = tl.load(slots + first + at, mask=inside, other=0).to(tl.int64)
        total += slot * tl.load(weights + at, mask=inside, other=0)
    return tl.sum(total, axis=0)


@launching.kernel(tensors=3, numbers=3)
def _expect_kernel(
    slots, weights, expected, row, count, words, SLICE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    to = expected + row.to(tl.int64) * words
    tl.store(to + 1 + part, _sum(slots, weights, part * SLICE, count, SLICE, BLOCK))
    if part == 0:
        tl.store(to, count.to(tl.int64))


@launching.kernel(tensors=5, numbers=3)
def _compare_kernel(
    table, rows, weights, expected, wrong, last, stride, words,
    SLICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    part = tl.program_id(1)
    if (row > 0) & (row < last):
        count = tl.load(expected + row * words)
        if part * SLICE < count:
            has = _sum(table + row * stride, weights, part * SLICE, count, SLICE, BLOCK)
            if has != tl.load(expected + row * words + 1 + part):
                tl.store(wrong + row, count)


_launch_expect = launching.Launcher(_expect_kernel)
_launch_compare = launching.Launcher(_compare_kernel)


def weights_of_a_slice() -> torch.Tensor:
    """int64 [SLICE]: odd, below 2**31, and not a simple series, so that no exchange of pages
    leaves the sum as it was."""
    at = np.arange(1, SLICE + 1, dtype=np.uint64) * np.uint64(_ODD)
    at ^= at >> np.uint64(15)
    at = (at * np.uint64(_ODD)) >> np.uint64(16)
    return torch.from_numpy(((at & np.uint64(0x7FFFFFFF)) | np.uint64(1)).astype(np.int64))


def slices(tokens: int) -> int:
    return -(-tokens // SLICE)


def sums(slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """int64 [slices]: the sum of each slice. slots: integer [n]."""
    padded = torch.zeros(slices(len(slots)) * SLICE, dtype=torch.int64)
    padded[: len(slots)] = slots.to(torch.int64)
    return (padded.view(-1, SLICE) * weights).sum(1)


def expect(
    slots: torch.Tensor, weights: torch.Tensor, expected: torch.Tensor, row: int, count: int,
    by_kernel: bool,
) -> None:  # fmt: skip
    """Note what the first ``count`` tokens of a row must be.

    slots: integer [>= count]. weights: int64 [SLICE]. expected: int64 [rows, 1 + slices], for each
    row how many tokens are known, and their sums. by_kernel: in one launch, for which nobody waits;
    else in torch.
    """
    if by_kernel:
        tensors = (slots.contiguous(), weights, expected)
        numbers = (row, count, expected.stride(0))
        _launch_expect((max(1, slices(count)), 1, 1), tensors, numbers, (SLICE, BLOCK))
        return
    expected[row, 0] = count
    expected[row, 1 : 1 + slices(count)] = sums(slots[:count], weights)


def compare(
    table: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, expected: torch.Tensor,
    wrong: torch.Tensor, most: int, by_kernel: bool,
) -> None:  # fmt: skip
    """Mark in ``wrong`` which of these rows is not what was expected.

    table: int32 [rows, tokens], ``req_to_token``. rows: integer [n]. wrong: int64 [rows], in pinned
    memory if the others are on a GPU. most: tokens that are known of any of these rows, or more.
    by_kernel: as of :func:`expect`.
    """
    if by_kernel:
        tensors = (table, rows.contiguous(), weights, expected, wrong)
        numbers = (len(table), table.stride(0), expected.stride(0))
        grid = (rows.numel(), max(1, slices(most)), 1)
        _launch_compare(grid, tensors, numbers, (SLICE, BLOCK))
        return
    for row in rows.tolist():
        if not 0 < row < len(table):
            continue
        count = int(expected[row, 0])
        has = sums(table[row, :count], weights)
        if not torch.equal(has, expected[row, 1 : 1 + slices(count)]):
            wrong[row] = count


class State(NamedTuple):
    """What SGLang says of a request: how many tokens the prefix cache has, its last node, and how
    often it was retracted. After a retraction it may have other pages for the same tokens."""

    rid: str
    tokens: int
    node: int
    retractions: int


class Learnt(NamedTuple):
    """What was summed up for a row. request: a weak reference to the request itself."""

    state: State
    request: Any


class LentRows:
    """What the prefix cache has for the first tokens of each row.

    known: row -> what was summed up. told: rows that were found wrong, and are not compared until
    they change.
    """

    def __init__(self, table: torch.Tensor) -> None:
        """table: int32 [rows, tokens], ``req_to_token``."""
        self.table = table
        self.known: dict[int, Learnt] = {}
        self.told: set[int] = set()
        device, shape = table.device, (len(table), 1 + slices(table.shape[1]))
        self._weights = weights_of_a_slice().to(device)
        self._expected = torch.zeros(shape, dtype=torch.int64, device=device)
        self._wrong = torch.zeros(len(table), dtype=torch.int64, pin_memory=table.is_cuda)
        self._words = self._wrong.numpy()
        # An event (``torch.cuda.Event``) for each step whose result was not processed yet, None
        # where nothing was compared.
        self._events: deque[Any] = deque(maxlen=IN_FLIGHT)
        if table.is_cuda:  # so that nothing is compiled while a request waits
            nobody = torch.zeros(1, dtype=torch.int64, device=device)
            expect(nobody, self._weights, self._expected, 0, 0, True)
            compare(table, nobody, self._weights, self._expected, self._wrong, 0, True)

    def learn(self, row: int, request: Any, state: State, slots: torch.Tensor) -> None:
        """The prefix cache has these slots for the first tokens of a row."""
        self.known[row] = Learnt(state, weakref.ref(request))
        self.told.discard(row)
        on_gpu = self.table.is_cuda
        expect(slots, self._weights, self._expected, row, state.tokens, on_gpu)

    def forget(self, row: int) -> None:
        """Compare nothing of this row until it is learnt anew."""
        self.leave(row)
        self._expected[row].zero_()

    def leave(self, row: int) -> None:
        """The request leaves its row, which no forward reads until it is given to another."""
        self.known.pop(row, None)
        self.told.discard(row)

    def tell(self, row: int) -> None:
        """A row was found wrong: that is told once."""
        self.told.add(row)
        self._expected[row].zero_()

    def compare(self, rows: torch.Tensor | None, most: int) -> None:
        """A step begins: compare these rows of ``req_to_token``. Waits for nothing on a GPU.

        most: tokens that are known of any of them, or more.
        """
        event = None
        if rows is not None:
            on_gpu = self.table.is_cuda
            compare(self.table, rows, self._weights, self._expected, self._wrong, most, on_gpu)
            if on_gpu:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        self._events.append(event)

    def take(self) -> list[int]:
        """The result of the oldest step is about to be processed: the rows that are wrong.

        Waits for that step's comparison, which was made before its forward.
        """
        event = self._events.popleft() if self._events else None
        if event is not None:
            event.synchronize()
        if not self._words.any():
            return []
        found = self._words.nonzero()[0]
        self._words[found] = 0
        return [int(row) for row in found]
