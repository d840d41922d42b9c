"""Turns what the page-table guard saw into a Finding, in words. Runs only if it saw something.

Everything is read as far as possible: after an error of the device the report says less, but
nothing that is not known.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Literal

from g4debug.findings.record import Finding, LayerKind, Location, PageEvent, Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.hooking.layer_pools import target_pool
from g4debug.ledger.ledger import Ledger, PoolLedger
from g4debug.tracers.page_table.backends import trtllm_mha
from g4debug.tracers.page_table.causes import cause
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.foreign import Foreign, confirm
from g4debug.tracers.page_table.launch import Cell, Launch, cell_of, read_table

logger = logging.getLogger("g4debug")
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
    "foreign-page",
    "unreadable",
]
NAMES: dict[Kind, KindName] = {
    Kind.NEGATIVE: "negative",
    Kind.RANGE: "out-of-range",
    Kind.SHORT: "row-too-short",
    Kind.ZERO: "page-zero",
    Kind.MISMATCH: "mismatch",
    Kind.FREED: "use-after-free",
    Kind.EVICTED: "evicted-in-window",
    Kind.FOREIGN: "foreign-page",
    Kind.UNREADABLE: "unreadable",
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
    "foreign-page": _WRONG,
    "unreadable": _WRONG,
}


class Unconfirmed(Exception):
    """SGLang's own tables do not confirm what the guard suspects. ``page``: of the full pool."""

    def __init__(self, page: int, why: str) -> None:
        super().__init__(why)
        self.page = page


def describe(
    launch: Launch | None,
    fields: dict[str, int],
    recorder: Recorder,
    draft: bool,
    ledger: Ledger | None,
) -> tuple[Finding, Table | None, tuple[PageEvent, ...]]:
    """The finding, the table (if the device can still be read), and the events of the page.

    Raises Unconfirmed for a suspicion that SGLang's own tables do not confirm.
    """
    if launch is None or cell_of(fields).kind is Kind.UNREADABLE:
        return _bare(fields, recorder), None, ()
    page_size = int(launch.backend.page_size)
    pool = Pool(
        launch.pool_name,
        launch.pages,
        page_size,
        (launch.pages - 1) * page_size,
        _used(recorder, launch.pool_name),
    )
    table, cell, foreign = None, cell_of(fields), None
    if cell.kind is Kind.FOREIGN:
        foreign = _confirmed(launch, cell, recorder, ledger)
    with suppress(RuntimeError):  # the CUDA context is dead: only what the guard wrote is left
        table, cell = read_table(launch, pool, recorder, cell)
    _settle(ledger)
    rid = table.rids[cell.row] if table is not None and cell.row < len(table.rids) else ""
    facts = Facts(launch, cell, rid, ledger, foreign)
    events = facts.events()
    layer = int(launch.layer.layer_id)
    kind: LayerKind = "sliding" if launch.pool_name == "swa" else "full"
    who = "draft" if draft else "target"
    mode = launch.batch.forward_mode.name
    count = len(table.bad) if table is not None and len(table.bad) else fields["count"]
    finding = Finding(
        check="page-table",
        kind=facts.kind,
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table in {who} {mode.lower().replace('_', '-')}: {kind} layer "
            f"{layer} {facts.what()} (request {rid or '?'}, row {cell.row}, column {cell.column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            forward_mode=mode,
            runner=who,
            layer=layer,
            layer_kind=kind,
            request=rid,
            row=cell.row,
            column=cell.column,
            replay=launch.captured,
        ),
        expected=facts.expected(),
        got=facts.got(count),
        owner=facts.owner(),
        history=tuple(event_line(e) for e in events),
        cause=cause(facts),
        reference=facts.fix() + REFERENCES[facts.kind],
        next_command=facts.next_command(),
    )
    return finding, table, events


class Facts:
    """What this process knows about one bad cell, and how the report says it."""

    def __init__(
        self,
        launch: Launch,
        cell: Cell,
        rid: str,
        ledger: Ledger | None,
        foreign: Foreign | None = None,
    ) -> None:
        self.launch, self.cell, self.rid = launch, cell, rid
        self.ledger, self.foreign = ledger, foreign
        self.request = ledger.requests.get(rid) if ledger is not None and rid else None
        self.value = cell.value
        self.pool_name = launch.pool_name
        self.page_size = int(launch.backend.page_size)
        self.request_row = self.full_page = self.swa_page = -1
        self.token: int | None = None  # what req_to_token has for the cell
        try:
            self.request_row = int(launch.batch.req_pool_indices[cell.row])
            table = launch.backend.req_to_token
            self.token = int(table[self.request_row, cell.column * self.page_size])
            self.full_page = self.token // self.page_size
            mapping = target_pool(launch.backend, launch.batch).full_to_swa_index_mapping
            if 0 <= self.token < len(mapping):
                self.swa_page = int(mapping[self.token]) // self.page_size
        except (AttributeError, IndexError, RuntimeError):
            pass
        self.right = cell.expected
        if self.right < 0:
            self.right = self.swa_page if self.pool_name == "swa" else self.full_page
        self.kind = self._kind()

    # --- what it is ------------------------------------------------------------------------

    @property
    def untranslated(self) -> bool:
        """True if the cell holds the request's own full-pool page where a SWA page belongs."""
        return (
            self.pool_name == "swa"
            and self.cell.kind in (Kind.RANGE, Kind.MISMATCH, Kind.EVICTED)
            and self.value > 0
            and self.value == self.full_page != self.right
        )

    @property
    def stale_state(self) -> bool:
        """True if the backend does not know that its pool is a SWA pool (upstream regression)."""
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
        """(pool, page) whose owner and events explain the finding. Page -1 if there is none."""
        if self.kind in ("full-index-in-swa-table", "use-after-free", "foreign-page"):
            return "full", self.full_page
        if self.kind == "evicted-in-window":
            return "swa", self.evicted_page()
        if self.kind in ("other-request", "stale", "mismatch"):
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

    # --- in words ----------------------------------------------------------------------------

    def what(self) -> str:
        """The middle of the headline, which says what the layer gets."""
        name, pages = self.pool_name.upper(), self.launch.pages
        right = f"the right {name} page is {self.right}"
        but = f"but {right if self.right > 0 else 'no page belongs there'}"
        if self.kind == "row-too-short":
            return f"reads {self.value} pages of a row that has only {self.cell.column}"
        if self.kind == "use-after-free":
            return f"reads full-pool page {self.full_page}, which is free"
        if self.kind == "evicted-in-window":
            return f"needs {self._tokens()} in its window, but their SWA page was evicted"
        if self.kind == "foreign-page":
            return self._foreign()
        if self.kind == "page-zero":
            return f"gets the reserved page 0, {but}"
        label = "full-pool page" if self.untranslated else "page"
        if not 0 <= self.value < pages:
            return f"gets {label} {self.value}, but its {name} pool has {pages} pages"
        whose = ""
        if self.kind == "other-request":
            whose = f" of request {self._owner_of(self.pool_name, self.value)}"
        free = " (free)" if self.kind == "stale" else ""
        return f"gets {label} {self.value}{whose}{free}, {but}"

    def _foreign(self) -> str:
        it = self.foreign
        assert it is not None
        swa = f" (SWA page {self.value})" if self.pool_name == "swa" else ""
        return (
            f"reads full-pool page {it.page}{swa} of request {it.owner} for {self._tokens()}, "
            f"because row {it.row} of req_to_token names it"
        )

    def expected(self) -> str:
        """What belongs in the cell."""
        if self.foreign is not None:
            own = f": page {self.foreign.own}" if self.foreign.own > 0 else ""
            return f"a page that was handed out to the request of the row itself{own}"
        if self.kind == "row-too-short":
            return f"at least {self.value} columns, one for each page of the row's length"
        if self.kind == "use-after-free":
            return f"a page that is held as long as {self._tokens()} are read"
        if self.kind == "evicted-in-window":
            return (
                f"a SWA page for {self._tokens()}, which the window of {self.launch.window} "
                "tokens still reaches"
            )
        belongs = f"; for this cell, page {self.right}" if self.right > 0 else ""
        return f"one of the pages 0..{self.launch.pages - 1} of the {self.pool_name} pool{belongs}"

    def got(self, count: int) -> str:
        """What is in the cell. ``count``: how many cells of the table are bad."""
        if self.kind == "row-too-short":
            return f"{self.cell.column} columns"
        return f"page {self.value} ({count} bad cell{'' if count == 1 else 's'} in the table)"

    def owner(self) -> str:
        """Who has the page that explains the finding, in words."""
        if self.foreign is not None:
            it = self.foreign
            also = (
                f"; row {it.owner_row} of request {it.owner} names it in column {it.owner_column}"
            )
            return self._held("full", it.page) + also
        if self.untranslated:
            return f"full-pool page {self.value} is held by request {self.rid or '?'} itself"
        if self.kind == "row-too-short":
            return ""
        if self.kind in ("negative", "out-of-range"):
            return f"no pool has a page {self.value}" + self._held(*self._subject(), "; ")
        return self._held(*self._subject())

    def _held(self, name: str, page: int, before: str = "") -> str:
        """Who holds a page, in words. '' if the ledger does not know it."""
        pool = self._pool(name)
        if pool is None or not 0 < page < pool.pages:
            return ""
        owner, position = str(pool.owner[page]) or "?", int(pool.position[page])
        what = f"{before}{name} page {page}"
        at = f" for tokens {position}..{position + self.page_size - 1}" if position >= 0 else ""
        if pool.held[page]:
            return f"{what} was handed out to request {owner}{at}, and is still held"
        if not pool.serials(page):
            return f"{what} was never handed out"
        return f"{what} is free; request {owner} had it last{at}"

    def _owner_of(self, name: str, page: int) -> str:
        return self.ledger.owner(name, page) if self.ledger is not None else ""

    def _tokens(self) -> str:
        first = self.cell.column * self.page_size
        return f"tokens {first}..{first + self.page_size - 1}"

    def fix(self) -> str:
        """The fix that matches, in front of the entry of TRIAGE.md; '' for none."""
        if self.stale_state:
            return "fix swa-state-swap (seed PR #6; sglang #25103 broke it, #26966 fixed it); "
        return ""

    def next_command(self) -> str:
        """What to run next."""
        if self.stale_state:
            return "G4DEBUG_FIX_SWA_STATE_SWAP=1 <your launch command>"
        if self.kind in ("use-after-free", "evicted-in-window", "row-too-short", "foreign-page"):
            return ALL  # not contain: with page 0 in place of what is gone, answers would be wrong
        return CONTAIN


def _confirmed(launch: Launch, cell: Cell, recorder: Recorder, ledger: Ledger | None) -> Foreign:
    """Raises Unconfirmed if SGLang's own tables do not say the same."""
    try:
        foreign, why = confirm(launch, cell, recorder, ledger)
    except (RuntimeError, IndexError) as e:
        foreign, why = None, f"they cannot be read: {e}".splitlines()[0]
    if foreign is None:
        page = -1
        with suppress(RuntimeError, IndexError):
            row = int(launch.batch.req_pool_indices[cell.row])
            size = int(launch.backend.page_size)
            page = int(launch.backend.req_to_token[row, cell.column * size]) // size
        raise Unconfirmed(page, why)
    return foreign


def event_line(event: PageEvent) -> str:
    """``step 12: extend for a1b2 (common.py:441 alloc_for_extend)``."""
    whom = f" for {event.request}" if event.request else ""
    by = f" ({event.caller})" if event.caller else ""
    note = f": {event.note}" if event.note else ""
    return f"step {event.step}: {event.kind}{whom}{by}{note}"


def _settle(ledger: Ledger | None) -> None:
    if ledger is None:
        return
    try:
        ledger.settle(wait=True)
    except RuntimeError as e:  # the CUDA context is dead, so the events up to now must do
        logger.warning("g4debug: page-table: the allocators' last events are lost (%s)", e)


def _used(recorder: Recorder, name: str) -> int:
    return next((p.used_tokens for p in recorder.pools() if p.name == name), -1)


def _bare(fields: dict[str, int], recorder: Recorder) -> Finding:
    """A finding from what the guard wrote, and nothing else."""
    cell = cell_of(fields)
    kind = NAMES[cell.kind]
    if cell.kind is Kind.UNREADABLE:
        return _unreadable(fields, recorder)
    outside = cell.kind in (Kind.NEGATIVE, Kind.RANGE)
    what = "is out of range" if outside else f"is wrong ({kind})"
    return Finding(
        check="page-table",
        kind=kind,
        site="attn.layer_page_table",
        headline=(
            f"g4debug: page-table: page {cell.value} {what} (row {cell.row}, column {cell.column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=recorder.step,
            row=cell.row,
            column=cell.column,
        ),
        expected=f"page {cell.expected}" if cell.expected > 0 else "a page of the layer's pool",
        got=str(cell.value),
        reference=REFERENCES[kind],
    )


def _unreadable(fields: dict[str, int], recorder: Recorder) -> Finding:
    """The finding that the guard saw something, and that what it left makes no sense."""
    return Finding(
        check="page-table",
        kind="unreadable",
        site="attn.layer_page_table",
        headline=(
            "g4debug: page-table: the guard saw a bad cell, but what it left cannot be read "
            f"(kind {fields['kind']}, row {fields['row']}, column {fields['column']})"
        ),
        location=Location(
            process="scheduler", pid=os.getpid(), rank=recorder.rank, step=recorder.step
        ),
        expected=f"a record of the guard, whose kind is one of 1..{int(Kind.FOREIGN)}",
        got=", ".join(f"{name} {value}" for name, value in fields.items()),
        cause="not known: somebody overwrote the host memory of the trap buffer",
        reference=REFERENCES["unreadable"],
        next_command=ALL,
    )
