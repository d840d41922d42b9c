"""Makes a finding from a record of a kernel and the host's evidence. Runs only for findings.

The evidence comes from the page ledger and the step recorder, which are in host memory. Where they
do not know, the finding says less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from g4debug import speculation
from g4debug.findings.kinds import FindingKind
from g4debug.findings.record import Finding, LayerKind, Location, PageEvent, Step
from g4debug.findings.steps import Recorder
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import event_line

if TYPE_CHECKING:
    from g4debug.sanitizer.device_check import Checked


def rid_of(recorder: Recorder, step: int, row: int) -> str:
    """The request that had a row of ``req_to_token`` in a step, -1 for now. '' if not known."""
    if step < 0:
        return recorder.requests_by_pool_index().get(row, "")
    for known in reversed(recorder.steps):
        if known.step == step and row in known.rows:
            return known.rids[known.rows.index(row)]
    return ""


@dataclass(frozen=True)
class RowOfBatch:
    """The scheduler's knowledge of one row of a batch when its forward began.

    Whatever a forward reads or writes is found by ``req_pool_indices`` and by the lengths. If these
    are not the batch's own, they are the cause of a wrong table or location.

    rid: the row's request. index: the row of ``req_to_token`` that this request has.

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
        """The sentence about a wrong ``req_pool_indices``, '' if it is right. row: of the batch."""
        if not self.is_another:
            return ""
        whose = f", the row of request {self.other}" if self.other else ""
        return (
            f"req_pool_indices is wrong: row {row} of the batch is request {self.rid}, which has "
            f"row {self.index} of req_to_token, and req_pool_indices[{row}] is {self.seen}{whose}. "
            "Who wrote it is not known"
        )

    def wrong_length(self, length: int) -> str:
        """The sentence about a wrong length in the forward, '' if it is not seen to be wrong."""
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
    worker = speculation.of(recorder.scheduler)
    if worker is not None and not worker.overlap:
        allocated = ()  # the verify takes room of its own, which the request does not count yet
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


class PageReport(ABC):
    """The lines of one finding. Each method gives one of them.

    rid: the request, '' if it is not known. record: the kind, which depends on the evidence.
    """

    record: FindingKind

    def __init__(self, checked: Checked, rid: str, ledger: Ledger | None) -> None:
        self.rid, self.ledger = rid, ledger
        self.pool_name, self.page_size = checked.pool_name, checked.page_size

    def finding(
        self,
        checked: Checked,
        recorder: Recorder,
        site: str,
        row: int,
        column: int,
        step: int = -1,
        runner: str = "target",
    ) -> Finding:
        """The finding. step: as in ``trap_buffer.Record``."""
        layer = int(checked.layer.layer_id)
        kind: LayerKind = "sliding" if self.pool_name == "swa" else "full"
        mode = checked.batch.forward_mode.name
        where = f"{runner} {mode.lower().replace('_', '-')}: {kind} layer {layer}"
        headline = f"g4debug: {self.record.check} in {where} {self.headline()}"
        return self.record.finding(
            site=site,
            headline=headline,
            location=Location(
                process="scheduler",
                step=step if step >= 0 else recorder.step,
                forward_mode=mode,
                runner=runner,
                layer=layer,
                layer_kind=kind,
                request=self.rid,
                row=row,
                column=column,
                replay=checked.captured,
            ),
            expected=self.expected(),
            got=self.got(),
            owner=self.owner(),
            history=tuple(event_line(event) for event in self.events()),
            cause=self.cause(),
            reference=self.fix() + self.record.reference_for(headline),
            next_command=self.command(),
        )

    @abstractmethod
    def headline(self) -> str:
        """The end of the headline: the event in the layer."""

    @abstractmethod
    def expected(self) -> str: ...

    @abstractmethod
    def got(self) -> str: ...

    @abstractmethod
    def cause(self) -> str: ...

    @abstractmethod
    def subject(self) -> tuple[str, int]:
        """(pool, page): its owner and events explain the finding. Page -1 if there is none."""

    def owner(self) -> str:
        """The owner of that page, in words."""
        return self.holder(*self.subject())

    def events(self) -> tuple[PageEvent, ...]:
        """The last events of that page, oldest first."""
        return self.history_of(*self.subject())

    def fix(self) -> str:
        """The fix that matches, in front of the entry of TRIAGE.md; '' for none."""
        return ""

    def command(self) -> str:
        """The next command to type."""
        return self.record.command

    # --- what the ledger knows -----------------------------------------------------------------

    def pool(self, name: str, page: int) -> PoolLedger | None:
        """The ledger of a pool. None if nothing is known of it, or it has no such page."""
        pool = None
        if self.ledger is not None and not self.ledger.broken:
            pool = self.ledger.pools.get(name)
        return pool if pool is not None and 0 < page < pool.pages else None

    def of_mismatch(
        self, page: int, kind: FindingKind, free: FindingKind, other: FindingKind
    ) -> FindingKind:
        """The kind if a page of the layer's pool is where it does not belong."""
        pool = self.pool(self.pool_name, page)
        if pool is None:
            return kind
        if not pool.held[page]:
            return free
        return other if self.is_of_another(self.pool_name, page) else kind

    def is_of_another(self, name: str, page: int) -> bool:
        """True if the ledger knows that another request holds the page."""
        pool = self.pool(name, page)
        if pool is None or not self.rid or not pool.held[page]:
            return False
        return str(pool.owner[page]) not in ("", self.rid)

    def holder(self, name: str, page: int) -> str:
        """The holder of a page, in words. '' if the ledger does not know it."""
        pool = self.pool(name, page)
        if pool is None:
            return ""
        owner, position = str(pool.owner[page]) or "?", int(pool.position[page])
        at = f" for tokens {position}..{position + self.page_size - 1}" if position >= 0 else ""
        if pool.held[page]:
            return f"{name} page {page} was handed out to request {owner}{at}, and is still held"
        if not pool.ever[page]:
            return f"{name} page {page} was never handed out"
        return f"{name} page {page} is free; request {owner} had it last{at}"

    def owner_of(self, name: str, page: int) -> str:
        """The request that a page was handed out to last, '?' if not known."""
        return (self.ledger.owner(name, page) if self.ledger is not None else "") or "?"

    def history_of(self, name: str, page: int) -> tuple[PageEvent, ...]:
        """The last events of a page, oldest first. () if there is no such page or no ledger."""
        return () if self.ledger is None or page <= 0 else self.ledger.history(name, page)
