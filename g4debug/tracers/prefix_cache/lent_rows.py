"""Compares the rows of ``req_to_token`` with the prefix cache, in each step.

The first ``cache_protected_len`` tokens of a request lie in pages of the prefix cache. The nodes
from the root to the request's last node have the slots of these tokens, and the request has locked
these nodes. So as long as it runs, its row must have the same slots. Other requests read some of
these pages by right, in the same columns, so only this comparison tells a page that is wrong.

When a request is admitted, or hands more tokens over, the sum of its path is made on the device.
In each step the sum of the row is compared with it there: one launch, for which nobody waits. Token
t has the weight ``weights[t]``, which is odd, so a single wrong slot always changes the sum. The
sums are int64 and wrap around.

A kernel writes to pinned memory which rows are wrong. Each word has one writer, and a word that the
host clears too early is written again in the next step, because a wrong row stays wrong.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import triton.language as tl

from g4debug import launching

BLOCK = 4096
IN_FLIGHT = 8  # steps of which the result is not processed yet; SGLang has two at most
_ODD = 0x9E3779B1  # of Fibonacci hashing (Knuth, TAOCP 3, 6.4)


@launching.kernel(tensors=3, numbers=2)
def _expect_kernel(slots, weights, expected, row, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < count, other=0).to(tl.int64)
        total += slot * tl.load(weights + at, mask=at < count, other=0)
    tl.store(expected + 2 * row, count.to(tl.int64))
    tl.store(expected + 2 * row + 1, tl.sum(total, axis=0))


@launching.kernel(tensors=5, numbers=2)
def _compare_kernel(
    table, rows, weights, expected, wrong, last, stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if (row > 0) & (row < last):
        count = tl.load(expected + 2 * row)
        right = tl.load(expected + 2 * row + 1)
        total = tl.zeros((BLOCK,), dtype=tl.int64)
        for begin in range(0, count, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            slot = tl.load(table + row * stride + at, mask=at < count, other=0).to(tl.int64)
            total += slot * tl.load(weights + at, mask=at < count, other=0)
        if (count > 0) & (tl.sum(total, axis=0) != right):
            tl.store(wrong + row, count)


_launch_expect = launching.Launcher(_expect_kernel)
_launch_compare = launching.Launcher(_compare_kernel)


def weights_of(tokens: int) -> torch.Tensor:
    """int64 [tokens]: odd, below 2**31, and not a simple series, so that no exchange of pages
    leaves the sum as it was."""
    at = np.arange(1, tokens + 1, dtype=np.uint64) * np.uint64(_ODD)
    at ^= at >> np.uint64(15)
    at = (at * np.uint64(_ODD)) >> np.uint64(16)
    return torch.from_numpy(((at & np.uint64(0x7FFFFFFF)) | np.uint64(1)).astype(np.int64))


def expect(
    slots: torch.Tensor, weights: torch.Tensor, expected: torch.Tensor, row: int, count: int
) -> None:
    """Note what the first ``count`` tokens of a row must be.

    slots: integer [>= count]. weights: int64 [tokens]. expected: int64 [rows, 2], for each row how
    many tokens are known, and their sum. Waits for nothing.
    """
    if slots.is_cuda:
        tensors = (slots.contiguous(), weights, expected)
        _launch_expect((1, 1, 1), tensors, (row, count), (BLOCK,))
        return
    expected[row, 0] = count
    expected[row, 1] = (slots[:count].to(torch.int64) * weights[:count]).sum()


def compare(
    table: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    expected: torch.Tensor,
    wrong: torch.Tensor,
) -> None:
    """Mark in ``wrong`` which of these rows is not what was expected.

    table: int32 [rows, tokens], ``req_to_token``. rows: integer [n]. wrong: int64 [rows], in pinned
    memory if the others are on a GPU. Waits for nothing there.
    """
    if table.is_cuda:
        tensors = (table, rows.contiguous(), weights, expected, wrong)
        _launch_compare((rows.numel(), 1, 1), tensors, (len(table), table.stride(0)), (BLOCK,))
        return
    for row in rows.tolist():
        if not 0 < row < len(table):
            continue
        count, right = expected[row].tolist()
        has = table[row, :count].to(torch.int64) * weights[:count]
        if count and int(has.sum()) != right:
            wrong[row] = count


class LentRows:
    """What the prefix cache has for the first tokens of each row.

    known: row -> the request, its ``cache_protected_len`` and its last node, of which the path was
    summed up. told: rows that were found wrong, and are not compared until they change.
    """

    def __init__(self, table: torch.Tensor) -> None:
        """table: int32 [rows, tokens], ``req_to_token``."""
        self.table = table
        self.known: dict[int, tuple[str, int, int]] = {}
        self.told: set[int] = set()
        device, pinned = table.device, table.is_cuda
        self._weights = weights_of(table.shape[1]).to(device)
        self._expected = torch.zeros((len(table), 2), dtype=torch.int64, device=device)
        self._wrong = torch.zeros(len(table), dtype=torch.int64, pin_memory=pinned)
        self._words = self._wrong.numpy()
        # An event (``torch.cuda.Event``) for each step whose result was not processed yet, None
        # where nothing was compared.
        self._events: deque[Any] = deque(maxlen=IN_FLIGHT)

    def learn(self, row: int, now: tuple[str, int, int], slots: torch.Tensor) -> None:
        """The prefix cache has these slots for the first tokens of a row: now[1] of them."""
        self.known[row] = now
        self.told.discard(row)
        expect(slots, self._weights, self._expected, row, now[1])

    def forget(self, row: int) -> None:
        """Compare nothing of this row until it is learnt anew."""
        if self.known.pop(row, None) is not None:
            self._expected[row].zero_()

    def tell(self, row: int) -> None:
        """A row was found wrong: that is told once."""
        self.told.add(row)
        self._expected[row].zero_()

    def compare(self, rows: torch.Tensor | None) -> None:
        """A step begins: compare these rows of ``req_to_token``. Waits for nothing on a GPU."""
        event = None
        if rows is not None:
            compare(self.table, rows, self._weights, self._expected, self._wrong)
            if self.table.is_cuda:
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
