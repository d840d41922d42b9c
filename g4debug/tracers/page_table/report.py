"""Turns what the page-table guard saw into a Finding, in words. Runs only if it saw something.

Everything is read as far as possible: after an error of the device the report says less, but
nothing that is not known.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from g4debug.findings import kinds
from g4debug.findings.record import Finding, LayerKind, Location, PageEvent, Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import event_line, settle
from g4debug.sanitizer.page_facts import rid_of
from g4debug.sanitizer.trap_buffer import Left, Record
from g4debug.tracers.page_table import causes
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import (
    Cell,
    CheckedTable,
    cell_of,
    kept_list,
    kept_table,
    read_table,
)
from g4debug.tracers.page_table.facts import Facts


def describe(
    launch: CheckedTable | None,
    cell: Cell,
    left: Left,
    recorder: Recorder,
    draft: bool,
    ledger: Ledger | None,
) -> tuple[Finding, Table | None, tuple[PageEvent, ...]]:
    """The finding, the table (if the device can still be read), and the events of the page."""
    if launch is None or cell.kind is Kind.UNREADABLE:
        return bare(launch, left.record, recorder), None, ()
    page_size = launch.page_size
    pool = Pool(
        launch.pool_name,
        launch.pages,
        page_size,
        (launch.pages - 1) * page_size,
        _used(recorder, launch.pool_name),
    )
    table, rid = None, ""
    with suppress(RuntimeError):  # the CUDA context is dead: only what the guard wrote is left
        if launch.lists is not None:
            row = cell.request if cell.step >= 0 else int(launch.req_pool_indices[cell.row])
            rid = rid_of(recorder, cell.step, row)
            table = kept_list(launch, pool, cell, left, rid)
        elif cell.step >= 0:
            rid = rid_of(recorder, cell.step, cell.request)
            table = kept_table(launch, pool, cell, left, rid)
        else:
            table, cell = read_table(launch, pool, recorder, cell)
            rid = table.rids[cell.row] if cell.row < len(table.rids) else ""
    settle(ledger, "page-table")
    kind_of = Words if launch.lists is None else ListWords
    facts = kind_of(launch, cell, rid, ledger)
    events = facts.events()
    layer = int(launch.layer.layer_id)
    kind: LayerKind = "sliding" if launch.pool_name == "swa" else "full"
    who = "draft" if draft else "target"
    mode = launch.batch.forward_mode.name
    whole = launch.lists is None and table is not None and len(table.bad) > 0
    count = len(table.bad) if whole and table is not None else left.record.bad
    column = cell.column if cell.position < 0 else cell.position
    finding = Finding(
        check="page-table",
        kind=facts.record.name,
        site=launch.adapter.handed_at(launch.batch),
        headline=(
            f"g4debug: page-table in {who} {mode.lower().replace('_', '-')}: {kind} layer "
            f"{layer} {facts.what()} (request {rid or '?'}, row {cell.row}, "
            f"{facts.place} {column})"
        ),
        location=Location(
            process="scheduler",
            pid=os.getpid(),
            rank=recorder.rank,
            step=cell.step if cell.step >= 0 else recorder.step,
            forward_mode=mode,
            runner=who,
            layer=layer,
            layer_kind=kind,
            request=rid,
            row=cell.row,
            column=column,
            replay=launch.captured,
        ),
        expected=facts.expected(),
        got=facts.got(count),
        owner=facts.owner(),
        history=tuple(event_line(e) for e in events),
        cause=causes.cause(facts),
        reference=facts.fix() + facts.record.reference,
        next_command=facts.next_command(),
    )
    return finding, table, events


class Words(Facts):
    """How the report says what is known about one bad cell."""

    place = "column"

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
        if self.record.outside:
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
        if not pool.ever[page]:
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
            return f"G4DEBUG_FIX_SWA_STATE_SWAP=1 {kinds.LAUNCH}"
        return self.record.command


class ListWords(Words):
    """The same of a bad entry of a list of tokens, or of a word beside the entries."""

    @property
    def place(self) -> str:  # type: ignore[override]
        return "index" if self.cell.position < 0 else "token"

    def what(self) -> str:
        cell, name = self.cell, self.pool_name.upper()
        value, expected = cell.value, cell.expected
        if self.kind == "list-bounds":
            return f"gets kv_indptr[{cell.column}] = {value}, but it must be {expected}"
        if self.kind == "row-too-short":
            return f"reads its list up to entry {value}, but kv_indices has {cell.column} entries"
        if self.kind == "kv-splits":
            return f"cuts a row into {value} parts (num_kv_splits), but 1 to {expected} are allowed"
        if self.kind == "window-offset":
            return f"gets window_kv_offsets = {value}, but the row's list begins at {expected}"
        if self.kind == "mask-bounds":
            return (
                f"gets mask_indptr = {value}, but the row's part of the mask begins at {expected}, "
                f"and the mask has {self._mask_size} cells"
            )
        if self.record.right_place:
            return super().what()
        right = f"the right {name} token is {cell.right}"
        but = f"but {right if cell.right > 0 else 'no token belongs there'}"
        at = f"for token {cell.position} of the request"
        if self.kind == "page-zero":
            return f"gets token {cell.token} of the reserved page 0 {at}, {but}"
        label = "full-pool token" if self.untranslated else "token"
        tokens = self.launch.pages * self.page_size
        if not 0 <= cell.token < tokens:
            return f"gets {label} {cell.token} {at}, but its {name} pool has {tokens} tokens"
        whose = ""
        if self.kind == "other-request":
            whose = f" of request {self._owner_of(self.pool_name, self.value)}"
        free = " (free)" if self.kind == "stale" else ""
        return f"gets {label} {cell.token}{whose}{free} {at}, {but}"

    @property
    def _mask_size(self) -> int:
        return 0 if self.launch.lists is None else self.launch.lists.mask_size

    def expected(self) -> str:
        cell = self.cell
        if cell.position < 0:
            if self.kind == "row-too-short":
                return f"a list of at least {cell.value} entries"
            return f"at most {cell.expected}" if self.kind == "kv-splits" else str(cell.expected)
        if self.record.right_place:
            return super().expected()
        last = self.launch.pages * self.page_size - 1
        belongs = f"; for this entry, token {cell.right}" if cell.right > 0 else ""
        return f"one of the tokens 0..{last} of the {self.pool_name} pool{belongs}"

    def got(self, count: int) -> str:
        if self.cell.position < 0:
            return str(self.cell.column if self.kind == "row-too-short" else self.cell.value)
        entries = "entry" if count == 1 else "entries"
        return f"token {self.cell.token} ({count} bad {entries} in this part of the list)"

    def owner(self) -> str:
        return "" if self.cell.position < 0 else super().owner()


def _used(recorder: Recorder, name: str) -> int:
    return next((p.used_tokens for p in recorder.pools() if p.name == name), -1)


def bare(launch: CheckedTable | None, record: Record, recorder: Recorder) -> Finding:
    """A finding from the guard's record, and nothing else. launch: None if it is not known."""
    cell = cell_of(record)
    kind, at, site = cell.kind.record, f"row {cell.row}, column {cell.column}", ""
    if launch is not None:
        with suppress(Exception):  # this is called when something else has failed already
            site = launch.adapter.handed_at(launch.batch)
    where = Location(process="scheduler", pid=os.getpid(), rank=recorder.rank, step=recorder.step)
    if cell.kind is Kind.UNREADABLE:
        what = "the guard saw a bad cell, but what it left cannot be read "
        what += f"(kind {record.kind}, {at})"
        written = ", ".join(str(int(k)) for k in sorted(Kind) if k is not Kind.UNREADABLE)
        expected = f"a record of the guard, whose kind is one of {written}"
        got = ", ".join(f"{name} {value}" for name, value in record._asdict().items())
        cause = "not known: somebody overwrote the host memory of the trap buffer"
    else:
        where = replace(where, row=cell.row, column=cell.column)
        wrong = "is out of range" if kind.outside else f"is wrong ({kind.name})"
        what = f"page {cell.value} {wrong} ({at})"
        expected = f"page {cell.expected}" if cell.expected > 0 else "a page of the layer's pool"
        got, cause = str(cell.value), ""
    return Finding(
        check="page-table",
        kind=kind.name,
        site=site,
        headline=f"g4debug: page-table: {what}",
        location=where,
        expected=expected,
        got=got,
        cause=cause,
        reference=kind.reference,
        next_command=kind.command,
    )
