"""One check of the locations that a forward writes in one pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4debug.sanitizer.device_check import Checked
from g4debug.sanitizer.misplaced import Misplaced
from g4debug.sanitizer.trap_buffer import Record
from g4debug.tracers.kv_writes.check import Kind, Rows


@dataclass(slots=True, kw_only=True)
class CheckedWrites(Checked):
    """One check, with what is needed to describe what it found.

    The other layers that write into this pool in the forward get the same locations. loc: what
    SGLang wanted to write to. out: where it may write. slots: of the pool, with those of page 0.
    """

    loc: torch.Tensor
    out: torch.Tensor
    slots: int
    rows: Rows

    def is_for(self, layer: Any, batch: Any, loc: torch.Tensor) -> bool:
        """True if these are the locations that were checked, for another layer of the forward."""
        return self.layer is not layer and self.batch is batch and self.has(loc)

    def has(self, loc: torch.Tensor) -> bool:
        """True if ``loc`` is what was checked: the same memory, in whatever tensor."""
        return (
            self.loc.data_ptr() == loc.data_ptr()
            and self.loc.shape == loc.shape
            and self.loc.dtype == loc.dtype
        )


@dataclass(frozen=True)
class Write:
    """One bad location: the words of a ``trap_buffer.Record`` as they are called here.

    row: in the batch. position: of the token in its request. value: the location. first: what the
    row's positions begin from. expected: where it belongs. foreign: of a write whose kind is
    FOREIGN.
    """

    row: int
    position: int
    value: int
    first: int
    count: int
    kind: Kind
    expected: int
    step: int
    request: int
    full: int
    twin: int = -1
    foreign: Misplaced | None = None


def write_of(record: Record) -> Write:
    """What is in a record, whatever that is."""
    kind = Kind(record.kind) if record.kind in set(Kind) else Kind.UNREADABLE
    return Write(*record[:5], kind, *record[6:])
