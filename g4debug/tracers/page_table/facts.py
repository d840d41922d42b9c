"""What is known about a bad cell of a page table: whose it is, what belongs there, what happened.

Everything is read as far as possible. After an error of the device, less is known.
"""

from __future__ import annotations

from g4debug.findings.kinds import FULL_INDEX, OTHER_REQUEST, STALE, FindingKind
from g4debug.findings.record import PageEvent
from g4debug.hooking.layer_pools import target_pool
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import Cell, CheckedTable


class Facts:
    """What this process knows about one bad cell."""

    def __init__(
        self,
        launch: CheckedTable,
        cell: Cell,
        rid: str,
        ledger: Ledger | None,
    ) -> None:
        self.launch, self.cell, self.rid = launch, cell, rid
        self.ledger, self.foreign = ledger, cell.foreign
        self.request = ledger.requests.get(rid) if ledger is not None and rid else None
        self.value = cell.value
        self.pool_name = launch.pool_name
        self.page_size = launch.page_size
        self.request_row = self.full_page = self.swa_page = -1
        self.token: int | None = None  # what req_to_token has for the cell
        try:
            if cell.step >= 0:  # as it was then; the live row may be another request's by now
                self.request_row, self.full_page = cell.request, cell.full
                self.token = cell.full * self.page_size if cell.full >= 0 else None
            else:
                self.request_row = int(launch.req_pool_indices[cell.row])
                table = launch.backend.req_to_token
                self.token = int(table[self.request_row, cell.column * self.page_size])
                self.full_page = self.token // self.page_size
            mapping = target_pool(launch.backend, launch.batch).full_to_swa_index_mapping
            if self.token is not None and 0 <= self.token < len(mapping):
                self.swa_page = int(mapping[self.token]) // self.page_size
                if cell.step >= 0 and self.swa_page == 0:
                    self.swa_page = -1  # the page may have been evicted since then
        except (AttributeError, IndexError, RuntimeError):
            pass
        self.right = cell.expected
        if self.right < 0:
            self.right = self.swa_page if self.pool_name == "swa" else self.full_page
        self.record = self._record()
        self.kind = self.record.name

    # --- what it is ------------------------------------------------------------------------

    @property
    def untranslated(self) -> bool:
        """True if the cell holds the request's own full-pool page where a SWA page belongs."""
        kind = self.cell.kind.record
        return (
            self.pool_name == "swa"
            and (kind.outside or kind.in_swa)
            and self.value > 0
            and self.value == self.full_page != self.right
        )

    @property
    def stale_state(self) -> bool:
        """True if the backend does not know that its pool is a SWA pool (upstream regression)."""
        return self.untranslated and self.launch.adapter.forgot_swa(self.launch.backend)

    def _record(self) -> FindingKind:
        if self.untranslated:
            return FULL_INDEX
        if self.cell.kind is not Kind.MISMATCH:
            return self.cell.kind.record
        pool = self._pool()
        if pool is None or not 0 < self.value < pool.pages:
            return Kind.MISMATCH.record
        if not pool.held[self.value]:
            return STALE
        owner = str(pool.owner[self.value])
        another = owner and self.rid and owner != self.rid
        return OTHER_REQUEST if another else Kind.MISMATCH.record

    def _pool(self, name: str = "") -> PoolLedger | None:
        if self.ledger is None or self.ledger.broken:
            return None
        return self.ledger.pools.get(name or self.pool_name)

    def _subject(self) -> tuple[str, int]:
        """(pool, page) whose owner and events explain the finding. Page -1 if there is none."""
        if self.kind == "evicted-in-window":
            return "swa", self.evicted_page()
        if self.untranslated or self.record.right_place:
            return "full", self.full_page
        if self.cell.kind is Kind.MISMATCH:
            return self.pool_name, self.value
        return self.pool_name, -1 if self.kind == "row-too-short" else self.right

    def evicted_page(self) -> int:
        """The SWA page that the tokens of this request had. -1 if it is not known any more."""
        pool = self._pool("swa")
        if pool is None or not self.rid:
            return -1
        had = (pool.position == self.cell.column * self.page_size) & (pool.owner == self.rid)
        found = had.nonzero()[0]
        return int(found[0]) if len(found) else -1

    def events(self) -> tuple[PageEvent, ...]:
        """The last events of the page that the finding is about, oldest first."""
        return self.history_of(*self._subject())

    def history_of(self, pool: str, page: int) -> tuple[PageEvent, ...]:
        """The last events of a page, oldest first. () if there is no such page or no ledger."""
        return () if self.ledger is None or page <= 0 else self.ledger.history(pool, page)

    @property
    def full_pages(self) -> int:
        """Pages of the full pool, 0 if not known."""
        pool = self._pool("full")
        return 0 if pool is None else pool.pages

    def own_column(self) -> int:
        """The column that the page of the cell really has in the request's row; -1 if none."""
        pool = self._pool()
        if pool is None or not 0 < self.value < pool.pages or not pool.held[self.value]:
            return -1
        mine = self.rid and str(pool.owner[self.value]) == self.rid
        position = int(pool.position[self.value])
        return position // self.page_size if mine and position >= 0 else -1
