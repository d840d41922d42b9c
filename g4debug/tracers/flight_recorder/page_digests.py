"""Digests of where the pages are: both pools' free lists in their order, and the SWA mapping.

On a GPU these lists are in device memory. So a digest is made there, by the stream that changes
them, and its copy to the host is read when the next one is due: nobody waits. Each list has a sum
of products modulo 2**64, which is the same on every device; the host makes one number of the sums.

The pinned memory of that copy is kept for the process's life. PyTorch records a CUDA event when
pinned memory is freed. After a CUDA error that raises in a destructor, and the process is aborted
before the flight recorder has written its dump.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.findings import tape

EVERY = 64  # steps; and before, in steps 1, 2, 4, 8, 16 and 32
_ODD = 0x1E3779B97F4A7C15  # any odd number: its multiples take long to repeat
LISTS = 5  # at most, see ``lists``
MIXED_SINCE = 3  # the tape's format


class PageDigests:
    """format: of the tape. A replay makes the digests of the tape that it is given."""

    def __init__(self, format: int = tape.FORMAT) -> None:
        self._mixes = format >= MIXED_SINCE
        self._weights = torch.empty(0, dtype=torch.int64)
        self._pending: tuple[int, int, Any] | None = None  # step, how many sums, event
        # A sum of each list. Most of the time goes into launches, so no kernel adds them up.
        self._sums = torch.empty(0, dtype=torch.int64)
        self._each: tuple[torch.Tensor, ...] = ()
        self._host = self._sums  # the same; on a GPU's host, and pinned
        self._event: Any = None

    def look(self, allocator: Any, step: int) -> None:
        """Make the digest of now, for the beginning of this step."""
        tensors = lists(allocator)
        if tensors and (not self._each or self._sums.device != tensors[0].device):
            self._make_room(tensors[0].device)
        for tensor, total in zip(tensors, self._each, strict=False):
            torch.sum(tensor.long() * self._weights_for(tensor), 0, out=total)
        if self._event is not None:
            self._host.copy_(self._sums, non_blocking=True)
            self._event.record()
        self._pending = step, len(tensors), self._event

    def _make_room(self, device: torch.device) -> None:
        self._sums = torch.empty(LISTS, dtype=torch.int64, device=device)
        self._each = self._sums.unbind()
        self._host = self._sums
        if device.type == "cuda":
            self._host = torch.empty(LISTS, dtype=torch.int64, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self) -> tuple[int, int] | None:
        """(step, digest) of the last look, None if it has not arrived or was taken."""
        if self._pending is None:
            return None
        step, count, event = self._pending
        self._pending = None
        try:
            if event is not None and not event.query():
                return None
        except RuntimeError:  # the device is dead
            return None
        digest = 0
        for place, total in enumerate(self._host[:count].tolist()):
            digest = (digest + total) * (_ODD + 2 * place)
        return step, digest & (1 << 64) - 1

    def _weights_for(self, tensor: torch.Tensor) -> torch.Tensor:
        count = len(tensor)
        if len(self._weights) < count or self._weights.device != tensor.device:
            numbers = torch.arange(max(count, 1), dtype=torch.int64, device=tensor.device)
            # The older weights grow evenly from place to place. So two lists whose pages changed
            # places alike had the same digest, wherever in the list that was.
            self._weights = _mix(numbers + 1) if self._mixes else (numbers + 1) * _ODD | 1
        return self._weights[:count]


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """As ``tape.mix``, on the device. torch has no operators for uint64, and it shifts signs in."""

    def shifted(by: int) -> torch.Tensor:
        return (numbers >> by) & (1 << 64 - by) - 1

    for by, factor in tape.MIXED:
        numbers = (numbers ^ shifted(by)) * (factor - (1 << 64))
    return numbers ^ shifted(tape.LAST_SHIFT)


def lists(allocator: Any) -> list[torch.Tensor]:
    """An allocator's free lists and its mapping to SWA pages, always in the same order."""
    full = getattr(allocator, "full_attn_allocator", allocator)
    parts = [full, getattr(allocator, "swa_attn_allocator", None)]
    found = [
        getattr(part, name, None) for part in parts for name in ("free_pages", "release_pages")
    ]
    found.append(getattr(allocator, "full_to_swa_index_mapping", None))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
