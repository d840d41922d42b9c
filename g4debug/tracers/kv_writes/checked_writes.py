"""One check of the locations that a forward writes in one pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4debug.findings.steps import Recorder
from g4debug.sanitizer.reference_state import Truth
from g4debug.tracers.kv_writes.check import Kind, Rows


@dataclass(slots=True)
class Launch:
    """One check, with what is needed to describe what it found.

    layer: the first one that writes into this pool in the forward; the others get the same
    locations. loc: what SGLang wanted to write to. out: where it may write. pool_name: "full" or
    "swa". slots: of the pool, with those of page 0.
    """

    backend: Any
    layer: Any
    batch: Any  # the ForwardBatch; in a captured CUDA graph, with static buffers
    loc: torch.Tensor
    out: torch.Tensor
    pool_name: str
    slots: int
    page_size: int
    rows: Rows
    truth: Truth | None
    slot: int
    captured: bool

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
    """One bad location, as the kernel left it. An unknown number is -1.

    row: in the batch. position: of the token in its request. value: the location. first: what the
    row's positions begin from. expected: where it belongs. other: of TWICE, another token of the
    forward that has this location; else the right place in the full pool. step: that the forward
    was launched in, -1 if it was compared with the live tables. request: row of ``req_to_token``.
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
    other: int


def write_of(fields: dict[str, int]) -> Write:
    """What is in a slot of the trap buffer, whatever that is."""
    known = fields["kind"] in {int(kind) for kind in Kind}
    return Write(
        row=fields["row"],
        position=fields["column"],
        value=fields["value"],
        first=fields["seq_len"],
        count=fields["count"],
        kind=Kind(fields["kind"]) if known else Kind.UNREADABLE,
        expected=fields["expected"],
        step=fields["step"],
        request=fields["request"],
        other=fields["full"],
    )


def rid_of(recorder: Recorder, write: Write) -> str:
    """The request that the write is of. '' if not known."""
    if write.step < 0:
        return recorder.requests_by_pool_index().get(write.request, "")
    for step in reversed(recorder.steps):
        if step.step == write.step and write.request in step.rows:
            return step.rids[step.rows.index(write.request)]
    return ""


def rid_in_row(recorder: Recorder, write: Write, row: int) -> str:
    """The request in another row of the same forward. '' if not known."""
    for step in reversed(recorder.steps):
        if write.step < 0 or step.step == write.step:
            return step.rids[row] if 0 <= row < len(step.rids) else ""
    return ""
