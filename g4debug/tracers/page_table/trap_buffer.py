"""The host memory in which the page-table guard leaves what it saw."""

from __future__ import annotations

import torch

FIELDS = 8  # int64 words in each slot
FLAG = 0  # first word of a slot: something was seen


class TrapBuffer:
    """Where the guard leaves what it saw: one slot for each launch, in host memory.

    Slot 0 is the summary: its FLAG is set as soon as the FLAG of any slot is. On a GPU the buffer
    is pinned memory, the kernel writes to it directly, and the host reads it without waiting.
    Elsewhere it is plain memory.
    """

    def __init__(self, device: torch.device, slots: int = 4096) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(slots * FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.claims = torch.zeros(slots, dtype=torch.int32, device=device)
        self.slots = slots
        self._used = 1
        self._view = self.host.numpy()

    def new_slot(self) -> int:
        """A new slot for one launch. When all are taken, further launches share the last one."""
        slot = self._used
        self._used = min(self._used + 1, self.slots - 1)
        return slot

    @property
    def tripped(self) -> bool:
        """True if the guard found a bad cell in any slot. Reads host memory and never waits."""
        return bool(self._view[FLAG])

    def tripped_slots(self) -> list[int]:
        """The slots whose flag is set, in order."""
        flags = self._view.reshape(-1, FIELDS)[1:, FLAG]
        return [int(i) + 1 for i in flags.nonzero()[0]]

    def fields(self, slot: int) -> dict[str, int]:
        """What the guard wrote into a slot: row, column, value, seq_len, count, kind, expected.

        If the row is too short, column is how many columns it has, and value how many it needs.
        """
        names = ("flag", "row", "column", "value", "seq_len", "count", "kind", "expected")
        words = self._view.reshape(-1, FIELDS)[slot]
        return {name: int(v) for name, v in zip(names, words, strict=True)}

    def clear(self) -> None:
        """Empty all slots. The device must be idle."""
        self._view[:] = 0
        self.claims.zero_()
