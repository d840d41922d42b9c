"""Brings small tensors of a step to the host, without waiting for the device.

A tensor's values are kept on the device, by a copy on the stream on which the step runs. At the end
all copies go into pinned memory in one piece. They are read when SGLang processes the step's
result. SGLang has waited for that stream by then. On a CPU the values are taken at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

MOST = 8  # the copies of so many steps may wait to be looked at
SMALLEST = 256  # numbers that a buffer has room for


class Copies:
    """The copies of one step: name -> numbers, whatever the shape of the tensor is."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._values: dict[str, list[int]] = {}
        self._kept: list[tuple[tuple[str, ...], list[int], torch.Tensor]] = []  # on the device
        self._pinned: list[tuple[tuple[str, ...], list[int], torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        self.lost = False  # there was no buffer for some of them

    def start(self, name: str, tensor: torch.Tensor | None) -> None:
        """Start to copy an integer tensor."""
        if tensor is not None:
            self.start_all({name: tensor})

    def start_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start to copy integer tensors of one device; one launch for all of the same type."""
        of_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            if tensor.is_cuda:
                of_type.setdefault(tensor.dtype, []).append((name, tensor.reshape(-1)))
            else:
                self._values[name] = tensor.reshape(-1).tolist()
        for group in of_type.values():
            names, parts = zip(*group, strict=True)
            self._kept.append((names, [len(part) for part in parts], torch.cat(parts)))

    def close(self) -> None:
        """Send all copies that were started since the last call to the host."""
        if not self._kept:
            return
        names = tuple(name for group, _, _ in self._kept for name in group)
        sizes = [n for _, group, _ in self._kept for n in group]
        # Another type is converted on the device. A copy that converts would wait.
        found = torch.cat([tensor.to(torch.int64) for _, _, tensor in self._kept])
        self._kept = []
        buffer = self._pool.take(len(found))
        if buffer is None:
            self.lost = True
            return
        buffer[: len(found)].copy_(found, non_blocking=True)
        self._pinned.append((names, sizes, buffer))
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def get(self) -> dict[str, list[int]] | None:
        """The numbers, None if they have not all arrived. The buffers are free afterwards."""
        if self._pinned:
            if self._event is None or not self._event.query():  # type: ignore[no-untyped-call]
                return None
            for names, sizes, buffer in self._pinned:
                numbers, at = buffer[: sum(sizes)].tolist(), 0
                for name, size in zip(names, sizes, strict=True):
                    self._values[name] = numbers[at : at + size]
                    at += size
            self._give_back()
        return self._values

    def drop(self) -> None:
        """Give the buffers back. A copy that still runs may write into them."""
        self._kept = []
        self._give_back()

    def _give_back(self) -> None:
        for _, _, buffer in self._pinned:
            self._pool.give(buffer)
        self._pinned = []

    def __del__(self) -> None:
        self._give_back()  # of a step with a result that nobody has processed


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
