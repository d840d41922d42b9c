"""The host memory in which the kernels leave their records, and the rules of writing and reading.

It has *mailboxes*, one for each check: a place for one record, many writers and one reader. A
kernel writes at any time, also while the host reads. So nothing here is ever cleared, and each word
has one writer:

* ``claims`` (device): the number of the last record that a program of the kernel took upon itself.
* ``host`` (host memory, written by the kernel): the record of each mailbox. Its words are written
  first, and the cells of the row, then there is a fence for the whole system, and then its number
  (word 0) is written.
* ``cells`` (host memory, written by the kernel): a part of the bad row, in the same way. The next
  forward may be launched before this one's findings are read, and uses the same table.
* ``acks`` (host memory, written by the host): the number of the last record that the host has
  read. Only then may the kernel write the next one over it.
* ``total`` (device): how many bad cells the kernels have seen in all.
* ``corrects`` (device, written by the host): whether a guard of ``watch`` replaces anything. One
  that is in a CUDA graph reads it at each replay.

A program that finds the last record unread writes none: its cells are only counted, and so they
are *merged* into that record. Whatever a program did, it ends by writing the new total to the first
word of ``host``. No two totals are equal, so the host notices each of them, and what it reads is
never half of two records. :mod:`g4debug.sanitizer.device_library` is the kernel's side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

CELLS = 64  # cells of the bad row that are kept with a record, and as many right contents
SEQ = 0  # the word with a record's number; the words of the record follow it
SUMMARY = 0  # first word of the buffer, in mailbox 0: the total

T = TypeVar("T")
Cells = np.ndarray[Any, np.dtype[np.int32]]
NO_CELLS: Cells = np.empty((2, 0), dtype=np.int32)


class Record(NamedTuple):
    """One bad thing: an int64 word for each field, in this order. -1: not known, or there is none.

    row: of the batch. at: where in the row: the column of a page table, the entry of a list of
        tokens, or the position of a written token in its request. For a row that is too short, how
        many it has; for a word beside a list, the index of that word.
    value: the page, token or location found there. For a row that is too short, how many it needs.
    length: the length of the row as the check got it: for a write, the position from which the
        row's tokens are counted, else how many tokens may be read.
    bad: how many bad things the writer saw. A program of a kernel looks at a part of one row.
    kind: the number of the check's Kind. expected: the right content, in the same unit as
        ``value``.
    step: the step that launched the forward. request: the row of ``req_to_token``. Both are -1
        where the kernel compared with SGLang's live tables (a write has the request then, too).
    full: the page of the full pool that ``req_to_token`` names; for a write, the location there.
    twin: for a location that is written twice, another token of the forward that has it.
    """

    row: int
    at: int
    value: int
    length: int
    bad: int
    kind: int
    expected: int = -1
    step: int = -1
    request: int = -1
    full: int = -1
    twin: int = -1


WORDS = 1 + len(Record._fields)  # in each mailbox


@dataclass(frozen=True)
class Left:
    """One record that a kernel left.

    suspicion: the record must be confirmed first. number: of this record in its mailbox, counted
        from 1.
    cells: int32 [2, CELLS], a part of the bad row and its right contents, -1 if not known. It
        begins at ``at // CELLS * CELLS`` (0 if the row is too short). Cells behind the row's
        length say nothing. [2, 0] with the live tables, which can be read instead.
    """

    mailbox: int
    suspicion: bool
    number: int
    record: Record
    cells: Cells


class TrapBuffer:
    """The mailboxes of one tracer. Mailbox 0 belongs to no check.

    On a GPU they are pinned memory: a kernel writes to them directly, and the host reads them
    without waiting. Elsewhere they are plain memory. Suspected violations use separate mailboxes,
    behind the others, so that they cannot mask confirmed ones.
    """

    def __init__(self, device: torch.device, mailboxes: int = 4096) -> None:
        pinned = device.type == "cuda"
        places = 2 * mailboxes
        self.host = torch.zeros(places * WORDS, dtype=torch.int64, pin_memory=pinned)
        self.acks = torch.zeros(places, dtype=torch.int64, pin_memory=pinned)
        self.cells = torch.zeros(places * 2 * CELLS, dtype=torch.int32, pin_memory=pinned)
        self.claims = torch.zeros(places, dtype=torch.int64, device=device)
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        self.corrects = torch.ones(1, dtype=torch.int32, device=device)
        self.mailboxes = mailboxes
        self.spoilt: set[int] = set()  # those with a number that no kernel can have written
        self.told = 0  # bad cells in the records that were read
        self._keeping: set[int] = set()  # mailboxes of which cells are kept in every record
        self._used = 1
        self._words = self.host.numpy().reshape(places, WORDS)
        self._acks = self.acks.numpy()
        self._cells = self.cells.numpy().reshape(places, 2, CELLS)
        self._summary = 0

    def new_mailbox(self) -> int:
        """A new one for one check. When all are taken, further checks share the last one."""
        mailbox = self._used
        self._used = min(self._used + 1, self.mailboxes - 1)
        return mailbox

    def keep_cells(self, mailbox: int) -> None:
        """The records of this mailbox have cells, whatever is compared with."""
        self._keeping.add(mailbox)

    def report_only(self) -> None:
        """Guards of ``watch`` replace nothing from now on, in CUDA graphs that exist, too.

        Waits for the device: graphs are replayed on streams of their own.
        """
        self.corrects.zero_()
        if self.corrects.is_cuda:
            torch.cuda.synchronize(self.corrects.device)

    # --- the host's side -------------------------------------------------------------------

    @property
    def tripped(self) -> bool:
        """True if anything was seen since the last ``take``. Reads host memory, no wait."""
        return bool(self._words[0, SUMMARY] != self._summary)

    def take(self) -> list[Left]:
        """The records that were not read yet, by mailbox. Each is given once. Never waits.

        If the number in a mailbox is not the next one, somebody else has written there. The mailbox
        is put into ``spoilt`` and not read again.
        """
        # First, so that records written from here on trip again.
        summary = int(self._words[0, SUMMARY])
        found = []
        new = self._words[1:, SEQ] != self._acks[1:]
        for place in (new.nonzero()[0] + 1).tolist():
            if place in self.spoilt:
                continue
            number = int(self._words[place, SEQ])
            if number != int(self._acks[place]) + 1:
                self.spoilt.add(place)
                continue
            record = Record(*self._words[place, 1:].tolist())
            suspicion, mailbox = divmod(place, self.mailboxes)
            kept = record.step >= 0 or mailbox in self._keeping
            cells = self._cells[place].copy() if kept else NO_CELLS
            self._acks[place] = number  # from here on the kernel may write over it
            found.append(Left(mailbox, bool(suspicion), number, record, cells))
            self.told += record.bad
        self._summary = summary
        return found

    def merged(self) -> int:
        """How many bad cells were counted and are in no record that was read. Waits.

        Raises RuntimeError if the device is lost.
        """
        return int(self.total) - self.told

    # --- the writer's side, for CPU tensors --------------------------------------------------

    def leave_first(
        self,
        mailbox: int,
        found: Sequence[T],
        suspected: Callable[[T], bool],
        record: Callable[[T, int], tuple[Record, Cells]],
    ) -> None:
        """Leave the first certain record and the first suspicion, as the kernels' references do.

        record: makes the record, and its cells, from one of ``found`` and how many it counts.
        """
        for suspicion in (False, True):
            part = [one for one in found if suspected(one) is suspicion]
            if part:
                words, cells = record(part[0], len(part))
                self.leave(mailbox, words, suspicion, cells)

    def leave(
        self, mailbox: int, record: Record, suspicion: bool = False, cells: Cells = NO_CELLS
    ) -> None:
        """Write a record as a kernel does."""
        for _ in self.leaving(mailbox + self.mailboxes * suspicion, record, cells):
            pass

    def leaving(self, place: int, record: Record, cells: Cells = NO_CELLS) -> Iterator[None]:
        """The same step by step; others may act between two steps."""
        at = place * WORDS
        acked = int(self.acks[place])
        yield
        if int(self.claims[place]) == acked:  # one step with the next line: compare and swap
            self.claims[place] = acked + 1
            yield
            for i, word in enumerate(record, at + 1):
                self.host[i] = word
                yield
            self._cells[place, :, : cells.shape[1]] = cells
            yield
            self.host[at + SEQ] = acked + 1
            yield
        self.total += record.bad
        total = int(self.total)
        yield
        self.host[SUMMARY] = total
