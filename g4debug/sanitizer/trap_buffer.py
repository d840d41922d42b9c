"""The host memory in which the page-table guard leaves what it saw, and how it is handed over.

The guard writes at any time, also while the host reads. So nothing here is ever cleared, and each
word has one writer:

* ``claims`` (device): the number of the last record that a program of the guard took upon itself.
* ``host`` (host memory, written by the guard): the record of each slot. Its words are written
  first, and the cells of the row, then there is a fence for the whole system, and then its number
  (``SEQ``) is written.
* ``cells`` (host memory, written by the guard): a part of the bad row, in the same way. The next
  forward may be launched before this one's findings are read, and uses the same table.
* ``acks`` (host memory, written by the host): the number of the last record that the host has
  read. Only then may the guard write the next one over it.
* ``total`` (device): how many bad cells the guard has seen in all.

A program that finds the last record unread writes none: its cells are only counted, and so they
are *merged* into that record. Whatever a program did, it ends by writing the new total to the first
word of ``host``. No two totals are equal, so the host notices each of them, and what it reads is
never half of two records. Each slot is a queue with one place, many writers and one reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

FIELDS = 11  # int64 words in each slot
SEQ, ROW, COLUMN, VALUE, SEQ_LEN, COUNT, KIND, EXPECTED, STEP, REQUEST, FULL = range(FIELDS)
CELLS = 64  # cells of the bad row that are kept with a record, and what belongs in each
SUMMARY = 0  # first word of the buffer, in slot 0: the total
NAMES = {
    "row": ROW,
    "column": COLUMN,
    "value": VALUE,
    "seq_len": SEQ_LEN,
    "count": COUNT,
    "kind": KIND,
    "expected": EXPECTED,
    "step": STEP,
    "request": REQUEST,
    "full": FULL,
}


Cells = np.ndarray[Any, np.dtype[np.int32]]
NO_CELLS: Cells = np.empty((2, 0), dtype=np.int32)


@dataclass(frozen=True)
class Left:
    """One record that the guard left.

    suspicion: it is about a cell that must be confirmed first.
    number: of this record in its slot, counted from 1.
    fields: row, column, value, seq_len, count, kind, expected, step, request, full. If the row is
        too short, column is how many columns it has, and value how many it needs. count: bad cells
        that the program of the guard saw, which looks at a part of one row. step: in which the
        forward was launched; request: the row of ``req_to_token``; full: the full page that it had
        for the cell then. These three are -1 where the guard compared with SGLang's live tables.
    cells: int32 [2, CELLS], a part of the bad row and what belongs there, -1 if that is not known.
        The first column is ``column // CELLS * CELLS`` (0 if the row is too short). What lies
        behind the row's length says nothing. [2, 0] with the live tables, which can be read
        instead.
    """

    slot: int
    suspicion: bool
    number: int
    fields: dict[str, int]
    cells: Cells


class TrapBuffer:
    """Where the guard leaves what it saw: one slot for each launch, in host memory.

    On a GPU the buffer is pinned memory, the kernel writes to it directly, and the host reads it
    without waiting. Elsewhere it is plain memory. Slot 0 belongs to no launch. Behind the slots
    lie as many for suspicions, so that one of these never stands in the way of what is certain.
    """

    def __init__(self, device: torch.device, slots: int = 4096) -> None:
        pinned = device.type == "cuda"
        places = 2 * slots
        self.host = torch.zeros(places * FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.acks = torch.zeros(places, dtype=torch.int64, pin_memory=pinned)
        self.cells = torch.zeros(places * 2 * CELLS, dtype=torch.int32, pin_memory=pinned)
        self.claims = torch.zeros(places, dtype=torch.int64, device=device)
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        self.slots = slots
        self.spoilt: set[int] = set()  # slots with a number that the guard cannot have written
        self.told = 0  # bad cells in the records that were read
        self._keeping: set[int] = set()  # slots of which cells are kept in every record
        self._used = 1
        self._words = self.host.numpy().reshape(places, FIELDS)
        self._acks = self.acks.numpy()
        self._cells = self.cells.numpy().reshape(places, 2, CELLS)
        self._summary = 0

    def new_slot(self) -> int:
        """A new slot for one launch. When all are taken, further launches share the last one."""
        slot = self._used
        self._used = min(self._used + 1, self.slots - 1)
        return slot

    def keep_cells(self, slot: int) -> None:
        """The records of this slot have cells, whatever is compared with."""
        self._keeping.add(slot)

    # --- the host's side -------------------------------------------------------------------

    @property
    def tripped(self) -> bool:
        """True if the guard saw something since the last ``take``. Reads host memory, no wait."""
        return bool(self._words[0, SUMMARY] != self._summary)

    def take(self) -> list[Left]:
        """The records that were not read yet, by slot. Each is given once. Never waits.

        A slot whose number is not the next one was written by somebody else. It is put into
        ``spoilt``, and not read again.
        """
        # First, so that what is written from here on trips again.
        summary = int(self._words[0, SUMMARY])
        found = []
        new = self._words[1:, SEQ] != self._acks[1:]
        for slot in (new.nonzero()[0] + 1).tolist():
            if slot in self.spoilt:
                continue
            number = int(self._words[slot, SEQ])
            if number != int(self._acks[slot]) + 1:
                self.spoilt.add(slot)
                continue
            words = self._words[slot].tolist()
            kept = words[STEP] >= 0 or slot % self.slots in self._keeping
            cells = self._cells[slot].copy() if kept else NO_CELLS
            self._acks[slot] = number  # from here on the guard may write over it
            fields = {name: words[i] for name, i in NAMES.items()}
            found.append(Left(slot % self.slots, slot >= self.slots, number, fields, cells))
            self.told += words[COUNT]
        self._summary = summary
        return found

    def merged(self) -> int:
        """How many bad cells were counted and are in no record that was read. Waits.

        Raises RuntimeError if the device is lost.
        """
        return int(self.total) - self.told

    # --- the guard's side --------------------------------------------------------------------

    def leave(
        self, slot: int, words: list[int], suspicion: bool = False, cells: Cells = NO_CELLS
    ) -> None:
        """What the guard's kernel does with the words 1.. of a record; for CPU tensors."""
        for _ in self.leaving(slot + self.slots * suspicion, words, cells):
            pass

    def leaving(self, slot: int, words: list[int], cells: Cells = NO_CELLS) -> Iterator[None]:
        """The same step by step; others may act between two steps."""
        at, count = slot * FIELDS, words[COUNT - 1]
        acked = int(self.acks[slot])
        yield
        if int(self.claims[slot]) == acked:  # one step with the next line: compare and swap
            self.claims[slot] = acked + 1
            yield
            for i, word in enumerate(words, ROW):
                self.host[at + i] = word
                yield
            self._cells[slot, :, : cells.shape[1]] = cells
            yield
            self.host[at + SEQ] = acked + 1
            yield
        self.total += count
        total = int(self.total)
        yield
        self.host[SUMMARY] = total
