"""Turns a bad location into a Finding, in words. Runs only if there is one.

Everything is read from host memory, but for SGLang's mapping. After an error of the device the
report says less, but nothing that is not known.
"""

from __future__ import annotations

from contextlib import suppress

from g4debug.findings import kinds
from g4debug.findings.record import Finding, Location, PageEvent
from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import GIVES, last_of, said, settle
from g4debug.sanitizer.page_report import PageReport, rid_of, row_of_batch
from g4debug.tracers.kv_writes.check import Kind
from g4debug.tracers.kv_writes.checked_writes import CheckedWrites, Write

UNKNOWN = -(1 << 62)
Found = tuple[Finding, tuple[PageEvent, ...]]


def describe(
    checked: CheckedWrites | None, write: Write, recorder: Recorder, ledger: Ledger | None
) -> Found:
    """The finding, and the events of the page that it is about."""
    if checked is None or write.kind is Kind.UNREADABLE:
        return _bare(write, recorder), ()
    settle(ledger, "kv-writes")
    words = Words(checked, write, recorder, ledger)
    column = write.position // words.page_size if write.position >= 0 else -1
    found = words.finding(checked, recorder, "kv.set", write.row, column, write.step)
    return found, words.events()


class Words(PageReport):
    """The words of the report about one bad location."""

    def __init__(
        self, checked: CheckedWrites, write: Write, recorder: Recorder, ledger: Ledger | None
    ) -> None:
        rid = "" if write.kind is Kind.PADDING else rid_of(recorder, write.step, write.request)
        super().__init__(checked, rid, ledger)
        self.checked, self.write = checked, write
        self.of_batch = None
        if write.kind is not Kind.PADDING:
            self.of_batch = row_of_batch(recorder, write.step, write.row, write.request)
            if self.of_batch is not None and self.of_batch.is_another:
                self.rid = self.of_batch.rid
        self.page = write.value // self.page_size
        self.twin = ""
        if write.kind is Kind.TWICE:
            row = self._row_of(write.twin)
            of = rid if row == write.row else _rid_in_row(recorder, write, row)
            self.twin = f"of request {of}" if of else f"of row {row}"
        self.record = write.kind.record
        if write.kind is Kind.MISMATCH:
            free, other = kinds.WRITTEN_TO_FREE, kinds.WRITTEN_TO_OTHER
            self.record = self.of_mismatch(self.page, self.record, free, other)
        self.kind = self.record.name

    def command(self) -> str:
        if self.write.expected == self.write.value:  # nothing would be written elsewhere
            return kinds.WRITES
        return super().command()

    def _row_of(self, token: int) -> int:
        """The row of a token of the same forward, -1 if it is not known any more."""
        rows = self.checked.rows
        if rows.per_row:
            return token // rows.per_row
        begin = 0
        for row, count in enumerate(self.checked.batch.extend_seq_lens_cpu):
            begin += int(count)
            if token < begin:
                return row
        return -1

    # --- the lines of the report -------------------------------------------------------------

    def headline(self) -> str:
        w, kind, name = self.write, self.kind, self.pool_name.upper()
        who = f"the KV of token {w.position} (request {self.rid or '?'}, row {w.row})"
        at = f"slot {w.value} (page {self.page})"
        full = w.full // self.page_size
        if w.position < 0:
            who = "the KV of a token"
        right = f", but {self._place('its place is')}" if w.expected >= 0 else ""
        if self.record.outside:
            slots = f"its {name} pool has {self.checked.slots} slots"
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
            return f"writes {who} to full page {full} of request {self.owner_of('full', full)}"
        if kind == "cached-page":
            return f"writes {who} to full page {full}, which the prefix cache holds"
        whose = f" of request {self.owner_of(self.pool_name, self.page)}"
        whose = whose if kind == "other-request" else " (free)" if kind == "stale" else ""
        return f"writes {who} to slot {w.value}, page {self.page}{whose}{right}"

    def _whose(self) -> str:
        w = self.write
        if w.expected < 0:
            return ""
        if w.expected == w.value:
            return ", which is its own"
        return f", but {self._place('its own is')}"

    def _place(self, words: str) -> str:
        """The place of this KV, and whose word that is if it is wrong itself. words: say so."""
        w = self.write
        by = f" by row {w.request} of req_to_token" if self._wrong_row() else ""
        return f"{words} slot {w.expected} (page {w.expected // self.page_size}){by}"

    def _held_by(self) -> str:
        owner = self.owner_of(self.pool_name, self.page)
        return f", which request {owner} had last" if owner else ""

    def expected(self) -> str:
        """Where this KV belongs."""
        w, pool = self.write, self.pool_name
        if self.kind == "padding-row":
            return "slot 0: padding belongs to nobody"
        if self.kind == "use-after-free":
            return "a page that is held as long as its tokens are written"
        if self.kind == "foreign-page":
            return "a page that was handed out to the request of the row itself"
        if self.kind == "cached-page":
            return "a page that no other request reads: what is cached is never written again"
        known = w.expected >= 0 and not self._wrong_row()
        belongs = f"; for this token, slot {w.expected}" if known else ""
        if self.kind == "written-twice":
            return f"a slot of its own for each token{belongs}"
        return f"one of the slots 0..{self.checked.slots - 1} of the {pool} pool{belongs}"

    def got(self) -> str:
        """The location, and how many are bad."""
        count = self.write.count
        return f"slot {self.write.value} ({count} bad location{'' if count == 1 else 's'} seen)"

    def subject(self) -> tuple[str, int]:
        if self.record.right_place:
            return "full", self.write.full // self.page_size
        if self.record.outside or self.kind == "page-zero":
            right = self.write.expected
            return self.pool_name, right // self.page_size if right >= 0 else -1
        return self.pool_name, self.page

    # --- the cause -----------------------------------------------------------------------------

    def cause(self) -> str:
        """Which of SGLang's records is wrong, as far as the evidence tells."""
        w, swa = self.write, self.pool_name == "swa"
        row = f"row {w.request} of req_to_token"
        if self.kind == "padding-row":
            return (
                "a CUDA graph was replayed for fewer requests than it has rows, and the locations "
                "of its other rows were not set to 0. Who wrote them is not known"
            )
        if self.of_batch is not None and (found := self.of_batch.wrong_index(w.row)):
            return found
        if self.record.right_place:
            return self._cause_of_right_place(row)
        if w.expected < 0:
            return (
                "not known, and neither is the token's right place; look at how out_cache_loc was "
                "made"
            )
        if w.expected == w.value:
            if swa:
                return (
                    f"not known: {row} and full_to_swa_index_mapping say the same, so either the "
                    "other token's location is wrong, or two cells of one of these name one place"
                )
            return (
                f"not known: {row} says the same, so either the other token's location is wrong, "
                "or two cells of req_to_token name one place"
            )
        if wrong := self._wrong_row():
            return f"{row} is wrong: {wrong}. Who wrote the row is not known"
        if swa and self._mapped(w.full) == w.value:
            return (
                f"full_to_swa_index_mapping is wrong: it says slot {w.value} for slot {w.full} of "
                "the full pool, which was handed out together with another one. The mapping was "
                "overwritten, or the SWA pool's allocator gave that slot; which of the two is not "
                "known"
            )
        full = self._full_location() if swa else -1
        if full >= 0 and full != w.full:
            made = ", and the sliding layers' location was made from it"
            return (
                f"ForwardBatch.out_cache_loc does not agree with {row}: it has slot {full} of the "
                f"full pool for this token, and the token's place is slot {w.full}"
                f"{made if self._mapped(full) == w.value else ''}. Who wrote that location is "
                "not known"
            )
        lost = f"ForwardBatch.out_cache_loc does not agree with {row}"
        if swa:
            lost = f"the sliding layers' locations do not agree with {row} and the mapping"
            if full < 0:
                lost += (
                    "; whether ForwardBatch.out_cache_loc was wrong already, from which they are "
                    "made, is not known"
                )
        if self.kind == "page-zero":
            return (
                f"{lost}: location 0 is what padding gets, so it may have been cleared, or never "
                "filled; which of the two is not known"
            )
        allocated = last_of(self.events(), GIVES)
        when = f". The page was handed out {said(allocated)}" if allocated is not None else ""
        return f"{lost}{when}. Who wrote that location is not known"

    def _wrong_row(self) -> str:
        """Why the row names a page that does not belong there, '' if it is not known to do so."""
        w, size = self.write, self.page_size
        page = w.full // size
        if w.full < 0:
            return ""
        if self.is_of_another("full", page):
            return f"it names page {page} there, which was not handed out to this request"
        pool = self.pool("full", page)
        if pool is None or not pool.held[page] or str(pool.owner[page]) != self.rid:
            return ""
        begin = int(pool.position[page])
        if not self.rid or begin < 0 or begin == w.position // size * size:
            return ""
        return (
            f"it names page {page} there, which was handed out to the request itself for tokens "
            f"{begin}..{begin + size - 1}"
        )

    def _mapped(self, full: int) -> int:
        """SGLang's mapping of a slot of the full pool.

        UNKNOWN if that is not known: -1 is what a broken mapping may say.
        """
        holders = self.ledger.holders if self.ledger is not None else None
        with suppress(RuntimeError, AttributeError, IndexError):
            if holders is not None and full > 0:
                return int(holders.allocator.full_to_swa_index_mapping[full])
        return UNKNOWN

    def _full_location(self) -> int:
        """Where the token's KV goes in the full pool by ``out_cache_loc``; -1: not known.

        With overlap scheduling the tensor in a CUDA graph may be another forward's by now.
        """
        w, rows = self.write, self.checked.rows
        loc = self.checked.full if w.step >= 0 else self.checked.batch.out_cache_loc
        if loc is None or w.position < 0:
            return -1
        number = w.position - w.first - rows.offset
        with suppress(RuntimeError, AttributeError, IndexError, TypeError):
            begin = w.row * rows.per_row if rows.per_row else int(rows.starts[w.row])  # type: ignore[index]
            return int(loc[begin + number])
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
            it = self.write.foreign
            what = "a page of another request, which the prefix cache lent to neither"
            if it is not None and it.is_its_own:
                what = "a page of its own request that was handed out for other tokens"
            proof = f" ({it.proof})" if it is not None and it.proof else ""
            return (
                f"{row} is wrong, and the location was made from it: it names {what}{proof}.{last} "
                "Who wrote the row is not known"
            )
        return (
            "the prefill began inside of the part of this request that the prefix cache holds: its "
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
    """A finding from the kernel's record, and nothing else."""
    kind = write.kind.record
    what = f"the KV of token {write.position} goes to slot {write.value}, which is wrong "
    what += f"({kind.name})"
    if write.kind is Kind.UNREADABLE:
        what = "a bad location was seen, but its record cannot be read"
    return kind.finding(
        site="kv.set",
        headline=f"g4debug: kv-writes: {what} (row {write.row})",
        location=Location(
            process="scheduler",
            step=recorder.step,
            row=write.row,
        ),
        expected=f"slot {write.expected}" if write.expected >= 0 else "a place of its own",
        got=f"slot {write.value}",
        cause="not known: nothing but this record is left",
    )
