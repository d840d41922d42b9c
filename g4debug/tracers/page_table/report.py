"""Turns a record of the page-table guard into a Finding, in words. Runs only if there is one.

Everything is read as far as possible: after an error of the device the report says less, but
nothing that is not known.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from g4debug.findings import kinds
from g4debug.findings.record import Finding, Location, PageEvent, Pool, Table
from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.page_history import settle
from g4debug.sanitizer.page_report import rid_of, row_of_batch
from g4debug.sanitizer.trap_buffer import Left, Record
from g4debug.tracers.page_table import causes
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import (
    Cell,
    CheckedTable,
    cell_of,
    kept,
    read_table,
)
from g4debug.tracers.page_table.facts import Facts


def describe(
    checked: CheckedTable | None,
    cell: Cell,
    left: Left,
    recorder: Recorder,
    draft: bool,
    ledger: Ledger | None,
) -> tuple[Finding, Table | None, tuple[PageEvent, ...]]:
    """The finding, the table (if the device can still be read), and the events of the page."""
    if checked is None or cell.kind is Kind.UNREADABLE:
        return bare(checked, left.record, recorder), None, ()
    pages, size, name = checked.pages, checked.page_size, checked.pool_name
    pool = Pool(name, pages, size, (pages - 1) * size, _used(recorder, name))
    table, rid = None, ""
    with suppress(RuntimeError):  # the CUDA context is dead: only what the guard wrote is left
        if checked.lists is not None or cell.step >= 0:
            row = cell.request if cell.step >= 0 else int(checked.req_pool_indices[cell.row])
            rid = rid_of(recorder, cell.step, row)
            table = kept(checked, pool, cell, left, rid)
        else:
            table, cell = read_table(checked, pool, recorder, cell)
            rid = table.rids[cell.row] if cell.row < len(table.rids) else ""
    settle(ledger, "page-table")
    seen = cell.request if cell.step >= 0 else -1
    if seen < 0:
        with suppress(RuntimeError, IndexError):
            seen = int(checked.req_pool_indices[cell.row])
    of_batch = row_of_batch(recorder, cell.step, cell.row, seen)
    if of_batch is not None and of_batch.is_another:
        rid = of_batch.rid
    kind = Words if checked.lists is None else ListWords
    words = kind(checked, cell, rid, ledger, of_batch, left.record.length)
    words.bad = left.record.bad
    if checked.lists is None and table is not None and len(table.bad) > 0:
        words.bad = len(table.bad)
    finding = words.finding(
        checked,
        recorder,
        checked.adapter.handed_at(checked.batch),
        cell.row,
        words.column,
        cell.step,
        "draft" if draft else "target",
    )
    return finding, table, words.events()


class Words(Facts):
    """The words of the report about one bad cell."""

    place = "column"
    bad = 0  # cells, as far as they were counted

    @property
    def column(self) -> int:
        return self.cell.column if self.cell.position < 0 else self.cell.position

    def headline(self) -> str:
        where = f"row {self.cell.row}, {self.place} {self.column}"
        return f"{self.what()} (request {self.rid or '?'}, {where})"

    def what(self) -> str:
        """The wrong content that the layer gets, in words."""
        name, pages = self.pool_name.upper(), self.checked.pages
        right = f"the right {name} page is {self.right}"
        but = f"but {right if self.right > 0 else 'no page belongs there'}"
        if self.kind == "row-too-short":
            return f"reads {self.value} pages of a row that has only {self.cell.column}"
        if self.kind == "use-after-free":
            return f"reads full-pool page {self.full_page}, which is free"
        if self.kind == "evicted-in-window":
            return f"needs {self._tokens()} in its window, but their SWA page was evicted"
        if self.foreign is not None:
            return self._foreign()
        if self.kind == "page-zero":
            return f"gets the reserved page 0, {but}"
        label = "full-pool page" if self.untranslated else "page"
        if not 0 <= self.value < pages:
            return f"gets {label} {self.value}, but its {name} pool has {pages} pages"
        whose = ""
        if self.kind == "other-request":
            whose = f" of request {self.owner_of(self.pool_name, self.value)}"
        free = " (free)" if self.kind == "stale" else ""
        return f"gets {label} {self.value}{whose}{free}, {but}"

    def _foreign(self) -> str:
        it = self.foreign
        assert it is not None
        swa = f" (SWA page {self.value})" if self.pool_name == "swa" else ""
        because = f"because row {it.row} of req_to_token names it"
        if it.is_its_own:
            had = self.pool("full", it.page)
            first = -1 if had is None else int(had.position[it.page])
            others = f" for tokens {first}..{first + self.page_size - 1}" if first >= 0 else ""
            return (
                f"reads full-pool page {it.page}{swa} for {self._tokens()}, which was handed out "
                f"to the request itself{others}, {because}"
            )
        whose = f" of request {it.owner}" if it.owner else ""
        return f"reads full-pool page {it.page}{swa}{whose} for {self._tokens()}, {because}"

    def expected(self) -> str:
        """The right content of the cell, in words."""
        if self.foreign is not None:
            own = f": full-pool page {self.foreign.own}" if self.foreign.own > 0 else ""
            if self.foreign.is_its_own:
                return f"the page that was handed out for these tokens{own}"
            return f"a page that was handed out to the request of the row itself{own}"
        if self.kind == "row-too-short":
            return f"at least {self.value} columns, one for each page of the row's length"
        if self.kind == "use-after-free":
            return f"a page that is held as long as {self._tokens()} are read"
        if self.kind == "evicted-in-window":
            return (
                f"a SWA page for {self._tokens()}, which the window of {self.checked.window} "
                "tokens still reaches"
            )
        belongs = f"; for this cell, page {self.right}" if self.right > 0 else ""
        return f"one of the pages 0..{self.checked.pages - 1} of the {self.pool_name} pool{belongs}"

    def got(self) -> str:
        """The content of the cell, and how many cells of the table are bad."""
        if self.kind == "row-too-short":
            return f"{self.cell.column} columns"
        return f"page {self.value} ({self.bad} bad cell{'' if self.bad == 1 else 's'} in the table)"

    def owner(self) -> str:
        """The owner of the page that explains the finding, in words."""
        if self.foreign is not None:
            it, also = self.foreign, ""
            if it.owner_row > 0:
                also = f"; row {it.owner_row} of request {it.owner} names it in column "
                also += str(it.owner_column)
            return self.holder("full", it.page) + also
        if self.untranslated:
            return f"full-pool page {self.value} is held by request {self.rid or '?'} itself"
        if self.kind == "row-too-short":
            return ""
        if self.record.outside:
            held = super().owner()
            return f"no pool has a page {self.value}" + (f"; {held}" if held else "")
        return super().owner()

    def _tokens(self) -> str:
        first = self.cell.column * self.page_size
        return f"tokens {first}..{first + self.page_size - 1}"

    def cause(self) -> str:
        return causes.cause(self)

    def fix(self) -> str:
        if self.stale_state:
            return "fix swa-state-swap (sglang #25103 broke it, #26966 fixed it); "
        return ""

    def command(self) -> str:
        if self.stale_state:
            return f"G4DEBUG_FIX_SWA_STATE_SWAP=1 {kinds.LAUNCH}"
        return self.record.command


class ListWords(Words):
    """The same for a bad entry of a list of tokens, or for a word beside the entries."""

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
            if self._mask_ends:
                return (
                    f"gets mask_indptr = {value}, where the row's part of the mask begins, but the "
                    f"mask has only {self._mask_size} cells"
                )
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
        tokens = self.checked.pages * self.page_size
        if not 0 <= cell.token < tokens:
            return f"gets {label} {cell.token} {at}, but its {name} pool has {tokens} tokens"
        whose = ""
        if self.kind == "other-request":
            whose = f" of request {self.owner_of(self.pool_name, self.value)}"
        free = " (free)" if self.kind == "stale" else ""
        return f"gets {label} {cell.token}{whose}{free} {at}, {but}"

    @property
    def _mask_size(self) -> int:
        return 0 if self.checked.lists is None else self.checked.lists.mask_size

    @property
    def _mask_ends(self) -> bool:
        """True if the row's part of the mask begins where it must, and the mask is too short."""
        return self.kind == "mask-bounds" and self.cell.value == self.cell.expected

    def expected(self) -> str:
        cell = self.cell
        if self._mask_ends:
            return f"a mask that holds the row's part, which begins at {cell.expected}"
        if cell.position < 0:
            if self.kind == "row-too-short":
                return f"a list of at least {cell.value} entries"
            return f"at most {cell.expected}" if self.kind == "kv-splits" else str(cell.expected)
        if self.record.right_place:
            return super().expected()
        last = self.checked.pages * self.page_size - 1
        belongs = f"; for this entry, token {cell.right}" if cell.right > 0 else ""
        return f"one of the tokens 0..{last} of the {self.pool_name} pool{belongs}"

    def got(self) -> str:
        if self._mask_ends:
            return f"a mask of {self._mask_size} cells"
        if self.cell.position < 0:
            return str(self.cell.column if self.kind == "row-too-short" else self.cell.value)
        entries = "entry" if self.bad == 1 else "entries"
        return f"token {self.cell.token} ({self.bad} bad {entries} in this part of the list)"

    def owner(self) -> str:
        return "" if self.cell.position < 0 else super().owner()


def _used(recorder: Recorder, name: str) -> int:
    return next((p.used_tokens for p in recorder.pools() if p.name == name), -1)


def bare(checked: CheckedTable | None, record: Record, recorder: Recorder) -> Finding:
    """A finding from the guard's record, and nothing else. checked: None if it is not known."""
    cell = cell_of(record)
    kind, at, site = cell.kind.record, f"row {cell.row}, column {cell.column}", ""
    if checked is not None:
        with suppress(Exception):  # this is called when something else has failed already
            site = checked.adapter.handed_at(checked.batch)
    where = Location(process="scheduler", step=recorder.step)
    if cell.kind is Kind.UNREADABLE:
        what = "the guard saw a bad cell, but its record cannot be read "
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
    return kind.finding(
        site=site,
        headline=f"g4debug: page-table: {what}",
        location=where,
        expected=expected,
        got=got,
        cause=cause,
    )
