"""The facts about a bad cell of a page table: its owner, its right content, its history.

Everything is read as far as possible. After an error of the device, less is known.
"""

from __future__ import annotations

from g4debug.findings.kinds import FULL_INDEX, MISPLACED, OTHER_REQUEST, STALE, FindingKind
from g4debug.hooking.layer_pools import target_pool
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer.page_report import PageReport, RowOfBatch
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import Cell, CheckedTable, first_listed

UNKNOWN = -(1 << 62)  # of a slot: -1 is what a broken mapping may say


class Facts(PageReport):
    """The facts that this process knows about one bad cell."""

    def __init__(
        self,
        checked: CheckedTable,
        cell: Cell,
        rid: str,
        ledger: Ledger | None,
        of_batch: RowOfBatch | None = None,
        length: int = -1,
    ) -> None:
        """of_batch: the row of the batch, None if it is not known. length: that the guard saw."""
        super().__init__(checked, rid, ledger)
        self.of_batch, self.length = of_batch, length
        self.checked, self.cell, self.foreign = checked, cell, cell.foreign
        self.request = ledger.requests.get(rid) if ledger is not None and rid else None
        self.value = cell.value
        self.request_row = self.full_page = self.swa_page = -1
        self.token: int | None = None  # what req_to_token has for the cell
        # The slot in req_to_token for the token itself, and the mapping's entry for that slot. A
        # cell's token is the first of its page; the token of a list's entry may be another one.
        self.slot = self.mapped = UNKNOWN
        self.of_full_list = False  # the entry is the one of the full layers' list
        try:
            if cell.step >= 0:  # as it was then; the live row may be another request's by now
                self.request_row, self.full_page = cell.request, cell.full
                self.token = cell.full * self.page_size if cell.full >= 0 else None
            else:
                self.request_row = int(checked.req_pool_indices[cell.row])
                rows = checked.rows
                self.token = int(rows[self.request_row, cell.column * self.page_size])
                self.full_page = self.token // self.page_size
            if self.token is not None:
                self.slot = self._slot()
            if self.pool_name == "swa" and self.token is not None:
                mapping = target_pool(checked.backend, checked.batch).full_to_swa_index_mapping
                if 0 <= self.slot < len(mapping):
                    self.mapped = int(mapping[self.slot])
                    self.swa_page = max(self.mapped, 0) // self.page_size
                if cell.step >= 0 and self.mapped == 0:
                    self.swa_page, self.mapped = -1, UNKNOWN  # it may have been evicted since then
                self.of_full_list = self._is_of_full_list()
        except (AttributeError, IndexError, RuntimeError):
            pass
        self.right = cell.expected
        if self.right < 0:
            self.right = self.swa_page if self.pool_name == "swa" else self.full_page
        self.record = self._record()
        self.kind = self.record.name

    def _slot(self) -> int:
        """The present slot in ``req_to_token`` for the token itself."""
        cell, token = self.cell, self.token or 0
        if cell.position < 0:
            return token
        row = self.checked.rows[self.request_row]
        if cell.step >= 0 and int(row[cell.column * self.page_size]) != token:
            return token + cell.position % self.page_size  # another request's row by now
        return int(row[cell.position])

    def _is_of_full_list(self) -> bool:
        """True if the full layers' list has the same entry at its place."""
        cell, window = self.cell, self.checked.window
        entry = cell.position - first_listed(self.length, window)
        if self.checked.lists is None or cell.position < 0 or not 0 <= entry < cell.position:
            return False
        return int(self.checked.rows[self.request_row, entry]) == cell.token

    @property
    def right_place(self) -> int:
        """The slot of the layer's pool that belongs to the token, UNKNOWN if that is not known."""
        if self.cell.position >= 0:
            return self.cell.right
        return self.right * self.page_size if self.right >= 0 else UNKNOWN

    # --- what it is ------------------------------------------------------------------------

    @property
    def untranslated(self) -> bool:
        """True if the cell holds the request's own full-pool page where a SWA page belongs."""
        kind = self.cell.kind.record
        if self.of_full_list and self.cell.token != self.right_place:
            return True
        return (
            self.pool_name == "swa"
            and (kind.outside or kind.in_swa)
            and self.value > 0
            and self.value == self.full_page != self.right
        )

    @property
    def stale_state(self) -> bool:
        """True if the backend does not know that its pool is a SWA pool (upstream regression)."""
        return self.untranslated and self.checked.adapter.forgot_swa(self.checked.backend)

    def _record(self) -> FindingKind:
        if self.untranslated:
            return FULL_INDEX
        kind = self.cell.kind
        if self.foreign is not None and self.foreign.is_its_own:
            return MISPLACED
        if kind is not Kind.MISMATCH:
            return kind.record
        return self.of_mismatch(self.value, kind.record, STALE, OTHER_REQUEST)

    def subject(self) -> tuple[str, int]:
        if self.kind == "evicted-in-window":
            return "swa", self.evicted_page()
        if self.untranslated or self.record.right_place:
            return "full", self.full_page
        if self.cell.kind is Kind.MISMATCH:
            return self.pool_name, self.value
        return self.pool_name, -1 if self.kind == "row-too-short" else self.right

    def evicted_page(self) -> int:
        """The SWA page that the tokens of this request had. -1 if it is not known any more."""
        pool = self.pool("swa", 1)
        if pool is None or not self.rid:
            return -1
        had = (pool.position == self.cell.column * self.page_size) & (pool.owner == self.rid)
        found = had.nonzero()[0]
        return int(found[0]) if len(found) else -1

    @property
    def full_pages(self) -> int:
        """Pages of the full pool, 0 if not known."""
        pool = self.pool("full", 1)
        return 0 if pool is None else pool.pages

    def own_page(self) -> int:
        """The full page that was handed out for the tokens of the cell and is held; -1 if none."""
        pool = self.pool("full", 1)
        if pool is None or not self.rid:
            return -1
        at = self.cell.column * self.page_size
        own = ((pool.owner == self.rid) & (pool.position == at) & pool.held).nonzero()[0]
        return int(own[-1]) if len(own) else -1

    def own_column(self) -> int:
        """The column that the page of the cell really has in the request's row; -1 if none."""
        pool = self.pool(self.pool_name, self.value)
        if pool is None or not pool.held[self.value]:
            return -1
        mine = self.rid and str(pool.owner[self.value]) == self.rid
        position = int(pool.position[self.value])
        return position // self.page_size if mine and position >= 0 else -1
