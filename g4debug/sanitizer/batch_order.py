"""What the scheduler knew of one row of a batch when its forward began, beside what a kernel saw.

Whatever a forward reads or writes is found by ``req_pool_indices`` and by the lengths. If these are
not the batch's own, tables and locations are those of other requests, or too long, and what is
wrong there follows from it. So this is looked at first.
"""

from __future__ import annotations

from dataclasses import dataclass

from g4debug.findings.record import Step
from g4debug.findings.steps import Recorder


@dataclass(frozen=True)
class RowOfBatch:
    """One row of a batch. rid: its request. index: that request's row of ``req_to_token``.

    committed, allocated: the request's tokens with KV, and with room; -1 if not known. seen: the
    row of ``req_to_token`` that the forward used for it, -1 if not known. other: the request that
    has that row, '' if it is not known. others: rid -> allocated tokens of the batch's other
    requests.
    """

    rid: str
    index: int
    committed: int
    allocated: int
    seen: int
    other: str
    others: dict[str, int]

    @property
    def is_another(self) -> bool:
        """True if the forward used another request's row of ``req_to_token``."""
        return self.seen >= 0 and self.seen != self.index

    def wrong_index(self, row: int) -> str:
        """What is wrong with ``req_pool_indices``, '' for nothing. row: of the batch."""
        if not self.is_another:
            return ""
        whose = f", which is that of request {self.other}" if self.other else ""
        return (
            f"req_pool_indices is wrong: row {row} of the batch is request {self.rid}, which has "
            f"row {self.index} of req_to_token, and req_pool_indices[{row}] is {self.seen}{whose}. "
            "Who wrote it is not known"
        )

    def wrong_length(self, length: int) -> str:
        """What is wrong with the length that the forward used, '' for nothing."""
        if length < 0 or not self.rid:
            return ""
        if 0 < self.allocated < length:
            why = f"and room for {self.allocated} was allocated for it"
        elif 0 < length < self.committed:
            why = f"and it has {self.committed} with KV"
        else:
            return ""
        same = [rid for rid, n in self.others.items() if n == length]
        swapped = f". It is the length of request {same[0]}, so rows may be swapped" if same else ""
        return (
            f"the length is wrong: seq_lens says {length} tokens for request {self.rid}, {why}"
            f"{swapped}. Who wrote it is not known"
        )


def row_of_batch(recorder: Recorder, step: int, row: int, seen: int) -> RowOfBatch | None:
    """The row of the batch of a step, -1 for the one that runs. None if that is not known."""
    found = _step(recorder, step)
    if found is None or not 0 <= row < len(found.rids) or len(found.rows) != len(found.rids):
        return None
    other = found.rids[found.rows.index(seen)] if seen in found.rows else ""
    of = found.rids[row]
    allocated = found.allocated if len(found.allocated) == len(found.rids) else ()
    committed = found.committed if len(found.committed) == len(found.rids) else ()
    return RowOfBatch(
        rid=of,
        index=found.rows[row],
        committed=committed[row] if committed else -1,
        allocated=allocated[row] if allocated else -1,
        seen=seen,
        other=other,
        others={rid: n for rid, n in zip(found.rids, allocated, strict=False) if rid != of},
    )


def _step(recorder: Recorder, step: int) -> Step | None:
    if step < 0:
        return recorder.current
    return next((known for known in reversed(recorder.steps) if known.step == step), None)
