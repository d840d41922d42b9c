"""Turns a bad location into a Finding, in words. Runs only if there is one.

Everything is read from host memory, but for SGLang's mapping. After an error of the device the
report says less, but nothing that is not known.
"""

from __future__ import annotations

import os
from contextlib import suppress

from g4debug.findings import kinds
from g4debug.findings.record import Finding, LayerKind, Location, PageEvent
from g4debug.findings.steps import Recorder
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import GIVES, event_line, last_of, said, settle
from g4debug.sanitizer.page_facts import rid_of
from g4debug.tracers.kv_writes.check import Kind
from g4debug.tracers.kv_writes.checked_writes import CheckedWrites, Write

Found = tuple[Finding, tuple[PageEvent, ...]]


def describe(
    launch: CheckedWrites | None, write: Write, recorder: Recorder, ledger: Ledger | None
) -> Found:
    """The finding, and the events of the page that it is about."""
    if launch is None or write.kind is Kind.UNREADABLE:
        return _bare(write, recorder), ()
    settle(ledger, "kv-writes")
    words = Words(launch, write, recorder, ledger)
    layer = int(launch.layer.layer_id)
    layer_kind: LayerKind = "sliding" if launch.pool_name == "swa" else "full"
    mode = launch.batch.forward_mode.name
    events = words.events()
    finding = Finding(
        check="kv-writes",
        kind=words.record.name,
        site="kv.set",
        headline=(
            f"g4debug: kv-writes in target {mode.lower().replace('_', '-')}: {layer_kind} layer "
            f"{layer} {words.what()}"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=write.step if write.step >= 0 else recorder.step,
            forward_mode=mode,
            runner="target",
            layer=layer,
            layer_kind=layer_kind,
            request=words.rid,
            row=write.row,
            column=write.position // words.size if write.position >= 0 else -1,
            replay=launch.captured,
        ),
        expected=words.expected(),
        got=words.got(),
        owner=words.owner(),
        history=tuple(event_line(e) for e in events),
        cause=words.cause(),
        reference=words.record.reference,
        next_command=words.command(),
    )
    return finding, events


class Words:
    """How the report says what is known about one bad location."""

    def __init__(
        self, launch: CheckedWrites, write: Write, recorder: Recorder, ledger: Ledger | None
    ) -> None:
        self.launch, self.write, self.ledger = launch, write, ledger
        self.size = launch.page_size
        self.rid = "" if write.kind is Kind.PADDING else rid_of(recorder, write.step, write.request)
        self.page = write.value // self.size
        self.twin = ""
        if write.kind is Kind.TWICE:
            row = self._row_of(write.twin)
            rid = self.rid if row == write.row else _rid_in_row(recorder, write, row)
            self.twin = f"of request {rid}" if rid else f"of row {row}"
        self.record = self._record()
        self.kind = self.record.name

    def _record(self) -> kinds.FindingKind:
        if self.write.kind is not Kind.MISMATCH:
            return self.write.kind.record
        pool = self._pool(self.launch.pool_name)
        if pool is None or not 0 < self.page < pool.pages:
            return Kind.MISMATCH.record
        if not pool.held[self.page]:
            return kinds.WRITTEN_TO_FREE
        owner = str(pool.owner[self.page])
        another = owner and self.rid and owner != self.rid
        return kinds.WRITTEN_TO_OTHER if another else Kind.MISMATCH.record

    def command(self) -> str:
        """What to type next."""
        if self.write.expected == self.write.value:  # nothing would be written elsewhere
            return kinds.WRITES
        return self.record.command

    def _pool(self, name: str) -> PoolLedger | None:
        if self.ledger is None or self.ledger.broken:
            return None
        return self.ledger.pools.get(name)

    def _row_of(self, token: int) -> int:
        """The row of a token of the same forward, -1 if it is not known any more."""
        rows = self.launch.rows
        if rows.per_row:
            return token // rows.per_row
        begin = 0
        for row, count in enumerate(self.launch.batch.extend_seq_lens_cpu):
            begin += int(count)
            if token < begin:
                return row
        return -1

    # --- the lines of the report -------------------------------------------------------------

    def what(self) -> str:
        """The end of the headline: what the layer writes where."""
        w, kind, name = self.write, self.kind, self.launch.pool_name.upper()
        who = f"the KV of token {w.position} (request {self.rid or '?'}, row {w.row})"
        at = f"slot {w.value} (page {self.page})"
        full = w.full // self.size
        if w.position < 0:
            who = "the KV of a token"
        right = f", but its place is slot {w.expected} (page {w.expected // self.size})"
        if w.expected < 0:
            right = ""
        if self.record.outside:
            slots = f"its {name} pool has {self.launch.slots} slots"
            return f"writes {who} to slot {w.value}, but {slots}{right.replace(', but', ';')}"
        if kind == "written-twice":
            return (
                f"writes {who} and another token {self.twin} to the same place, {at} of the "
                f"{name} pool{self._whose()}"
            )
        if kind == "page-zero":
            return f"writes {who} to the reserved page 0 (slot {w.value}){right}"
        if kind == "padding-row":
            return f"writes padding (row {w.row}) to {at} of the {name} pool{self._held_by()}"
        if kind == "use-after-free":
            return f"writes {who} to full page {full}, which is free"
        if kind == "foreign-page":
            return f"writes {who} to full page {full} of request {self._owner('full', full)}"
        if kind == "cached-page":
            return f"writes {who} to full page {full}, which the prefix cache holds"
        whose = f" of request {self._owner(self.launch.pool_name, self.page)}"
        whose = whose if kind == "other-request" else " (free)" if kind == "stale" else ""
        return f"writes {who} to slot {w.value}, page {self.page}{whose}{right}"

    def _whose(self) -> str:
        w = self.write
        if w.expected < 0:
            return ""
        if w.expected == w.value:
            return ", which is its own"
        return f", but its own is slot {w.expected} (page {w.expected // self.size})"

    def _held_by(self) -> str:
        owner = self._owner(self.launch.pool_name, self.page)
        return f", which request {owner} had last" if owner else ""

    def expected(self) -> str:
        """Where this KV belongs."""
        w, pool = self.write, self.launch.pool_name
        if self.kind == "padding-row":
            return "slot 0: padding belongs to nobody"
        if self.kind == "use-after-free":
            return "a page that is held as long as its tokens are written"
        if self.kind == "foreign-page":
            return "a page that was handed out to the request of the row itself"
        if self.kind == "cached-page":
            return "a page that no other request reads: what is cached is never written again"
        belongs = f"; for this token, slot {w.expected}" if w.expected >= 0 else ""
        if self.kind == "written-twice":
            return f"a slot of its own for each token{belongs}"
        return f"one of the slots 0..{self.launch.slots - 1} of the {pool} pool{belongs}"

    def got(self) -> str:
        """The location, and how many are bad."""
        count = self.write.count
        return f"slot {self.write.value} ({count} bad location{'' if count == 1 else 's'} seen)"

    def _subject(self) -> tuple[str, int]:
        """(pool, page) whose owner and events explain the finding. Page -1 if there is none."""
        if self.record.right_place:
            return "full", self.write.full // self.size
        if self.record.outside or self.kind == "page-zero":
            right = self.write.expected
            return self.launch.pool_name, right // self.size if right >= 0 else -1
        return self.launch.pool_name, self.page

    def owner(self) -> str:
        """Who has the page that the finding is about, in words. '' if that is not known."""
        name, page = self._subject()
        pool = self._pool(name)
        if pool is None or not 0 < page < pool.pages:
            return ""
        owner, position = str(pool.owner[page]) or "?", int(pool.position[page])
        at = f" for tokens {position}..{position + self.size - 1}" if position >= 0 else ""
        if pool.held[page]:
            return f"{name} page {page} was handed out to request {owner}{at}, and is still held"
        if not pool.ever[page]:
            return f"{name} page {page} was never handed out"
        return f"{name} page {page} is free; request {owner} had it last{at}"

    def _owner(self, pool: str, page: int) -> str:
        return (self.ledger.owner(pool, page) if self.ledger is not None else "") or "?"

    def events(self) -> tuple[PageEvent, ...]:
        """The last events of the page that the finding is about, oldest first."""
        name, page = self._subject()
        return () if self.ledger is None or page <= 0 else self.ledger.history(name, page)

    # --- the cause -----------------------------------------------------------------------------

    def cause(self) -> str:
        """Which of SGLang's records is wrong, as far as the evidence tells."""
        w, swa = self.write, self.launch.pool_name == "swa"
        row = f"row {w.request} of req_to_token"
        if self.kind == "padding-row":
            return (
                "a CUDA graph was replayed for fewer requests than it has rows, and the locations "
                "of its other rows were not set to 0. Who wrote them is not known"
            )
        if self.record.right_place:
            return self._cause_of_right_place(row)
        if w.expected < 0:
            return (
                "not known: what the location was compared with says nothing about this token; "
                "look at how out_cache_loc was made"
            )
        if w.expected == w.value:
            return (
                f"not known: {row} says the same, so either the other token's location is wrong, "
                "or two cells of req_to_token name one place"
            )
        if not swa and self._is_of_another(w.expected // self.size):
            return (
                f"{row} is wrong: it names page {w.expected // self.size} there, which was not "
                "handed out to this request. Who wrote the row is not known"
            )
        if swa and self._mapped() == w.value:
            return (
                f"full_to_swa_index_mapping is wrong: it says slot {w.value} for slot {w.full} of "
                "the full pool, which was handed out together with another one. Who changed it is "
                "not known"
            )
        lost = f"ForwardBatch.out_cache_loc is not what {row} says"
        if swa:
            lost = f"the sliding layers' locations are not what {row} and the mapping say"
        if self.kind == "page-zero":
            return (
                f"{lost}: location 0 is what padding gets, so it may have been cleared, or never "
                "filled; which of the two is not known"
            )
        allocated = last_of(self.events(), GIVES)
        when = f". The page was handed out {said(allocated)}" if allocated is not None else ""
        return f"{lost}{when}. Who wrote that location is not known"

    def _is_of_another(self, page: int) -> bool:
        """True if the ledger knows that a page of the full pool is not this request's."""
        pool = self._pool("full")
        if pool is None or not self.rid or not 0 < page < pool.pages:
            return False
        owner = str(pool.owner[page])
        return bool(owner) and owner != self.rid and bool(pool.held[page])

    def _mapped(self) -> int:
        """What SGLang's mapping says of the token's place in the full pool; -1: not known."""
        holders = self.ledger.holders if self.ledger is not None else None
        with suppress(RuntimeError, AttributeError, IndexError):
            if holders is not None and self.write.full > 0:
                return int(holders.allocator.full_to_swa_index_mapping[self.write.full])
        return -1

    def _cause_of_right_place(self, row: str) -> str:
        events, last = self.events(), ""
        if events:
            last = f" The last that happened to it was: {events[-1].kind} {said(events[-1])}."
        if self.kind == "use-after-free":
            if not events:
                return f"{row} names a page that was never handed out. Who wrote it is not known"
            return f"{row} names a page that was freed too early.{last}"
        if self.kind == "foreign-page":
            return (
                f"{row} is wrong, and the location was made from it: it names a page of another "
                f"request, which the prefix cache lent to neither.{last} Who wrote the row is not "
                "known"
            )
        return (
            "the prefill began before the end of what the prefix cache holds of this request: its "
            "prefix length is too short, or its cache_protected_len too long; which of the two is "
            f"not known.{last}"
        )


def _rid_in_row(recorder: Recorder, write: Write, row: int) -> str:
    """The request in another row of the same forward. '' if not known."""
    for step in reversed(recorder.steps):
        if write.step < 0 or step.step == write.step:
            return step.rids[row] if 0 <= row < len(step.rids) else ""
    return ""


def _bare(write: Write, recorder: Recorder) -> Finding:
    """A finding from what the kernel left, and nothing else."""
    kind = write.kind.record
    what = f"the KV of token {write.position} goes to slot {write.value}, which is wrong "
    what += f"({kind.name})"
    if write.kind is Kind.UNREADABLE:
        what = "a bad location was seen, but what was left of it cannot be read"
    return Finding(
        check="kv-writes",
        kind=kind.name,
        site="kv.set",
        headline=f"g4debug: kv-writes: {what} (row {write.row})",
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            row=write.row,
        ),
        expected=f"slot {write.expected}" if write.expected >= 0 else "a place of its own",
        got=f"slot {write.value}",
        cause="not known: nothing but this record is left",
        reference=kind.reference,
        next_command=kind.command,
    )
