"""What else the process knows about one bad cell, in the words of the report.

All reads are best effort: after a device fault the report says less, and nothing that is not
known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from g4debug.findings.record import PageEvent
from g4debug.hooking.layer_pools import target_pool
from g4debug.ledger.ledger import Ledger, PoolLedger
from g4debug.tracers.page_table.backends import trtllm_mha
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.launch import Launch

CONTAIN = "G4DEBUG_MODE=contain SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>"
ALL = "SGLANG_TRTLLM_MHA_DEBUG=1 <your launch command>"
KindName = Literal[
    "negative",
    "out-of-range",
    "row-too-short",
    "page-zero",
    "mismatch",
    "use-after-free",
    "evicted-in-window",
    "full-index-in-swa-table",
    "other-request",
    "stale",
]
NAMES: dict[Kind, KindName] = {
    Kind.NEGATIVE: "negative",
    Kind.RANGE: "out-of-range",
    Kind.SHORT: "row-too-short",
    Kind.ZERO: "page-zero",
    Kind.MISMATCH: "mismatch",
    Kind.FREED: "use-after-free",
    Kind.EVICTED: "evicted-in-window",
}
_CRASH = "TRIAGE.md, 'Illegal memory access in decode'"
_WRONG = "TRIAGE.md, 'The page table names a wrong page'"
_EVICTED = "TRIAGE.md, 'A SWA page is evicted inside the window'"
REFERENCES: dict[KindName, str] = {
    "negative": _WRONG,
    "out-of-range": _WRONG,
    "row-too-short": _WRONG,
    "page-zero": _WRONG,
    "mismatch": _WRONG,
    "use-after-free": _WRONG,
    "evicted-in-window": _EVICTED,
    "full-index-in-swa-table": _CRASH,
    "other-request": _WRONG,
    "stale": _WRONG,
}


@dataclass(frozen=True)
class Cell:
    """One bad cell. Of a row that is too short: column = its columns, value = pages it needs."""

    row: int
    column: int
    value: int
    kind: Kind
    expected: int  # page that belongs there, -1 if not known


class Facts:
    def __init__(self, launch: Launch, cell: Cell, rid: str, ledger: Ledger | None) -> None:
        self.launch, self.cell, self.rid = launch, cell, rid
        self.ledger = ledger
        self.value = cell.value
        self.pool_name = launch.pool_name
        self.page_size = int(launch.backend.page_size)
        self.full_page = self.swa_page = -1
        try:
            index = int(launch.batch.req_pool_indices[cell.row])
            token = int(launch.backend.req_to_token[index, cell.column * self.page_size])
            self.full_page = token // self.page_size
            mapping = target_pool(launch.backend, launch.batch).full_to_swa_index_mapping
            self.swa_page = int(mapping[token]) // self.page_size
        except (AttributeError, IndexError, RuntimeError):
            pass
        self.right = cell.expected
        if self.right < 0:
            self.right = self.swa_page if self.pool_name == "swa" else self.full_page
        self.kind = self._kind()

    # --- what it is ------------------------------------------------------------------------

    @property
    def untranslated(self) -> bool:
        """The cell holds the request's own full-pool page where a SWA page belongs."""
        return (
            self.pool_name == "swa"
            and self.cell.kind in (Kind.RANGE, Kind.MISMATCH, Kind.EVICTED)
            and self.value > 0
            and self.value == self.full_page != self.right
        )

    @property
    def stale_state(self) -> bool:
        """The backend does not know that its pool is a SWA pool: the upstream regression."""
        return self.untranslated and trtllm_mha.forgot_swa(self.launch.backend)

    def _kind(self) -> KindName:
        if self.untranslated:
            return "full-index-in-swa-table"
        if self.cell.kind is not Kind.MISMATCH:
            return NAMES[self.cell.kind]
        pool = self._pool()
        if pool is None or not 0 < self.value < pool.pages:
            return "mismatch"
        if not pool.held[self.value]:
            return "stale"
        owner = str(pool.owner[self.value])
        return "other-request" if owner and self.rid and owner != self.rid else "mismatch"

    def _pool(self, name: str = "") -> PoolLedger | None:
        if self.ledger is None or self.ledger.broken:
            return None
        return self.ledger.pools.get(name or self.pool_name)

    def _subject(self) -> tuple[str, int]:
        """(pool, page) whose owner and events explain the finding; page -1 for none."""
        if self.kind == "full-index-in-swa-table" or self.kind == "use-after-free":
            return "full", self.full_page
        if self.kind == "evicted-in-window":
            return "swa", self._evicted()
        if self.kind in ("other-request", "stale", "mismatch"):
            return self.pool_name, self.value
        return self.pool_name, -1 if self.kind == "row-too-short" else self.right

    def _evicted(self) -> int:
        """The SWA page that this request's tokens had; -1 if it is not known any more."""
        pool = self._pool("swa")
        if pool is None or not self.rid:
            return -1
        had = (pool.position == self.cell.column * self.page_size) & (pool.owner == self.rid)
        found = had.nonzero()[0]
        return int(found[0]) if len(found) else -1

    def events(self) -> tuple[PageEvent, ...]:
        """The last events of the page that the finding is about, oldest first."""
        pool, page = self._subject()
        return () if self.ledger is None or page <= 0 else self.ledger.history(pool, page)

    # --- in words ----------------------------------------------------------------------------

    def what(self) -> str:
        """What the layer gets: the middle of the headline."""
        name, pages = self.pool_name.upper(), self.launch.pages
        its = f"its {name} page is {self.right}" if self.right > 0 else "no page belongs there"
        if self.kind == "row-too-short":
            return f"reads {self.value} pages of a row that has {self.cell.column}"
        if self.kind == "use-after-free":
            return f"reads full-pool page {self.full_page}, which is free"
        if self.kind == "evicted-in-window":
            return f"needs {self._tokens()} in its window, their SWA page was evicted"
        if self.kind == "page-zero":
            return f"gets the reserved page 0, {its}"
        label = "full-pool page" if self.untranslated else "page"
        if not 0 <= self.value < pages:
            return f"gets {label} {self.value}, its {name} pool has {pages} pages"
        whose = ""
        if self.kind == "other-request":
            whose = f" of request {self._owner_of(self.pool_name, self.value)}"
        free = " (free)" if self.kind == "stale" else ""
        return f"gets {label} {self.value}{whose}{free}, {its}"

    def expected(self) -> str:
        if self.kind == "row-too-short":
            return f"at least {self.value} columns: one for each page of the row's length"
        if self.kind == "use-after-free":
            return f"a page that is held as long as {self._tokens()} are read"
        if self.kind == "evicted-in-window":
            return f"a SWA page for {self._tokens()}: the window of {self.launch.window} reaches it"
        belongs = f"; for this request and column: {self.right}" if self.right > 0 else ""
        return f"a page of the {self.pool_name} pool, 0..{self.launch.pages - 1}{belongs}"

    def got(self, count: int) -> str:
        if self.kind == "row-too-short":
            return f"{self.cell.column} columns"
        return f"{self.value} ({count} bad cell{'' if count == 1 else 's'})"

    def owner(self) -> str:
        if self.untranslated:
            return f"full-pool page {self.value} is held by request {self.rid or '?'} itself"
        if self.kind == "row-too-short":
            return ""
        if self.kind in ("negative", "out-of-range"):
            return f"no pool has a page {self.value}" + self._held(*self._subject(), "; ")
        return self._held(*self._subject())

    def _held(self, name: str, page: int, before: str = "") -> str:
        """Who holds a page, in words; '' if the ledger does not know it."""
        pool = self._pool(name)
        if pool is None or not 0 < page < pool.pages:
            return ""
        owner, position = str(pool.owner[page]) or "?", int(pool.position[page])
        what = f"{before}{name} page {page}"
        at = f" for tokens {position}..{position + self.page_size - 1}" if position >= 0 else ""
        if pool.held[page]:
            return f"{what} was handed out to request {owner}{at}, and is held"
        if not pool.serials(page):
            return f"{what} was never handed out"
        return f"{what} is free; the last to have it was request {owner}{at}"

    def _owner_of(self, name: str, page: int) -> str:
        return self.ledger.owner(name, page) if self.ledger is not None else ""

    def _tokens(self) -> str:
        first = self.cell.column * self.page_size
        return f"tokens {first}..{first + self.page_size - 1}"

    def cause(self) -> str:
        if self.stale_state:
            return (
                "full-pool indices reached a sliding layer: the attention backend has "
                f"{trtllm_mha.swa_state(self.launch.backend)}, "
                "while the pool it reads is a SWAKVPool, so the table was not translated"
            )
        if self.untranslated:
            return (
                "a full-pool index stands where the translated one belongs, though the backend "
                "translates: the SWA table was overwritten, or this cell of it never translated"
            )
        if self.kind == "row-too-short":
            return (
                "seq_lens and the table were made from different lengths, or the request is "
                "longer than the CUDA graph's static table: the kernel reads the next row"
            )
        if self.kind == "use-after-free":
            return (
                "the request's pages were given back while it is still being served: its last "
                "free is in the history"
            )
        if self.kind == "evicted-in-window":
            return (
                "SWA pages were evicted too early: the mapping of these tokens is gone, and the "
                "sliding layers read page 0 or somebody else's KV"
            )
        if self.full_page < 0:
            return ""
        if self.full_page == 0:
            return "req_to_token has no token there: the row is longer than what was allocated"
        return (
            "the cell differs from what req_to_token says "
            f"(full page {self.full_page}, SWA page {self.swa_page}): "
            "the table was overwritten after it was built, or built from stale data"
        )

    def fix(self) -> str:
        """The fix that matches, in front of the entry of TRIAGE.md; '' for none."""
        if self.stale_state:
            return "fix swa-state-swap (seed PR #6; sglang #25103 broke it, #26966 fixed it); "
        return ""

    def next_command(self) -> str:
        if self.stale_state:
            return "G4DEBUG_FIX_SWA_STATE_SWAP=1 <your launch command>"
        if self.kind in ("use-after-free", "evicted-in-window", "row-too-short"):
            return ALL  # page 0 in place of what is gone makes wrong answers: not contain
        return CONTAIN


def event_line(event: PageEvent) -> str:
    """``step 12: extend for a1b2 (common.py:441 alloc_for_extend)``."""
    whom = f" for {event.request}" if event.request else ""
    by = f" ({event.caller})" if event.caller else ""
    note = f": {event.note}" if event.note else ""
    return f"step {event.step}: {event.kind}{whom}{by}{note}"
