"""Brings small tensors of a step to the host, without waiting for the device.

A copy into pinned memory is started on the stream on which the step runs. It is looked at when
SGLang processes the step's result. SGLang has waited for that stream by then. On a CPU the values
are taken at once.
"""

from __future__ import annotations

import torch

MOST = 8  # steps whose copies may wait to be looked at
SMALLEST = 256  # numbers that a buffer has room for


class Copies:
    """The copies of one step: name -> numbers."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._values: dict[str, list[int]] = {}
        self._pinned: dict[str, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self.lost = False  # there was no buffer for some of them

    def start(self, name: str, tensor: torch.Tensor | None) -> None:
        """Start to copy an integer tensor [requests]."""
        if tensor is None:
            return
        if not tensor.is_cuda:
            self._values[name] = tensor.tolist()
            return
        buffer = self._pool.take(tensor.shape[0])
        if buffer is None:
            self.lost = True
            return
        self._pinned[name] = buffer
        # Another type is converted on the device. A copy that converts would wait.
        buffer[: tensor.shape[0]].copy_(tensor.to(torch.int64), non_blocking=True)
        self._values[name] = [0] * tensor.shape[0]

    def close(self) -> None:
        """No more copies are started for this step."""
        if self._pinned:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def get(self) -> dict[str, list[int]] | None:
        """The numbers, None if they have not all arrived. The buffers are free afterwards."""
        if self._pinned:
            if self._event is None or not self._event.query():  # type: ignore[no-untyped-call]
                return None
            for name, buffer in self._pinned.items():
                self._values[name] = buffer[: len(self._values[name])].tolist()
            self.drop()
        return self._values

    def drop(self) -> None:
        """Give the buffers back. A copy that still runs may write into them."""
        for buffer in self._pinned.values():
            self._pool.give(buffer)
        self._pinned = {}


class Pool:
    """Pinned buffers, a bounded number, used again and again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._made = 0
        self._size = SMALLEST

    def take(self, size: int) -> torch.Tensor | None:
        """A buffer for ``size`` numbers, None if too many are in use."""
        if size > self._size:
            self._size = 2 * size
            self._made -= len(self._free)
            self._free = []
        while self._free:
            buffer = self._free.pop()
            if buffer.shape[0] >= size:
                return buffer
            self._made -= 1
        if self._made >= 4 * MOST:
            return None
        self._made += 1
        return torch.empty(self._size, dtype=torch.int64, pin_memory=True)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)
