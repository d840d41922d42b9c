"""Where the page-table guard leaves what it saw: in host memory, readable without a sync."""

from __future__ import annotations

import torch

FIELDS = 8  # int64 words per slot in the host buffer
FLAG = 0  # first word of a slot: something was seen


class TrapBuffer:
    """Where the kernel leaves what it saw: one slot of FIELDS int64 per launch, in host memory.

    Slot 0 is the summary: its FLAG is non-zero as soon as any slot's is. On CUDA the
    buffer is pinned and the kernel writes to it directly; elsewhere it is plain memory.
    """

    def __init__(self, device: torch.device, slots: int = 4096) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(slots * FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.claims = torch.zeros(slots, dtype=torch.int32, device=device)
        self.slots = slots
        self._used = 1
        self._view = self.host.numpy()

    def new_slot(self) -> int:
        """A slot of its own for one launch; the last one is shared once all are taken."""
        slot = self._used
        self._used = min(self._used + 1, self.slots - 1)
        return slot

    @property
    def tripped(self) -> bool:
        """True if some slot saw a bad cell. A read of host memory: never waits."""
        return bool(self._view[FLAG])

    def tripped_slots(self) -> list[int]:
        """Sites whose flag is set, in order."""
        flags = self._view.reshape(-1, FIELDS)[1:, FLAG]
        return [int(i) + 1 for i in flags.nonzero()[0]]

    def fields(self, slot: int) -> dict[str, int]:
        """What the kernel wrote for a slot: row, column, value, seq_len, count, kind, expected.

        Of a row that is too short, column is its columns, and value how many it needs.
        """
        names = ("flag", "row", "column", "value", "seq_len", "count", "kind", "expected")
        words = self._view.reshape(-1, FIELDS)[slot]
        return {name: int(v) for name, v in zip(names, words, strict=True)}

    def clear(self) -> None:
        """Empty all slots. The device must be idle."""
        self._view[:] = 0
        self.claims.zero_()
