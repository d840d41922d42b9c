"""One check of the locations that a forward writes in one pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from g4debug.sanitizer.device_check import Checked
from g4debug.sanitizer.misplaced import Misplaced
from g4debug.sanitizer.trap_buffer import Record
from g4debug.tracers.kv_writes.check import Kind, Rows


@dataclass(slots=True, kw_only=True)
class CheckedWrites(Checked):
    """One check, with all that a description of its records needs.

    The other layers that write into this pool in the forward get the same locations. loc: the
    locations that SGLang wanted to write to. out: the locations that it may write to. slots: how
    many the pool has, page 0 included. full: a copy of the batch's ``out_cache_loc``, from which
    the sliding layers' locations are made, for a description that comes later.
    """

    loc: torch.Tensor
    out: torch.Tensor
    slots: int
    rows: Rows
    full: torch.Tensor | None = None

    def remembered(self) -> CheckedWrites:
        """The same, with what may be overwritten before a finding is described."""
        loc = self.batch.out_cache_loc if self.pool_name == "swa" else None
        return self if loc is None else replace(self, full=loc.clone())

    def is_for(self, layer: Any, batch: Any, loc: torch.Tensor) -> bool:
        """True if these are the locations that were checked, for another layer of the forward."""
        return self.layer is not layer and self.batch is batch and self.has(loc)

    def has(self, loc: torch.Tensor) -> bool:
        """True if ``loc`` is the tensor that was checked, or another view of the same memory."""
        return (
            self.loc.data_ptr() == loc.data_ptr()
            and self.loc.shape == loc.shape
            and self.loc.dtype == loc.dtype
        )


@dataclass(frozen=True)
class Write:
    """One bad location: the words of a ``trap_buffer.Record`` as they are called here.

    row: in the batch. position: of the token in its request. value: the location. first: the
    position from which the row's tokens are counted. expected: the right location. foreign: only
    of a write of the kind FOREIGN.
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

    def full_page(self, page_size: int) -> int:
        return self.full // page_size


def write_of(record: Record) -> Write:
    """The write that a record describes; its kind is UNREADABLE if no such Kind exists."""
    kind = Kind(record.kind) if record.kind in set(Kind) else Kind.UNREADABLE
    return Write(*record[:5], kind, *record[6:])
