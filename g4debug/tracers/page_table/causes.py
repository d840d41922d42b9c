"""The likely cause of a wrong cell, from the tables, the mapping and the ledger.

A cell of a page table is found by ``req_pool_indices`` and the length of its row. It is made from a
row of ``req_to_token``, and for the SWA pool from ``full_to_swa_index_mapping``. So each of them is
looked at, in this order, and the first that is wrong is named. Who wrote it is said only if the
ledger saw it. Where the evidence fits more than one cause, the text names the part that is not
known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4debug.hooking import req_kv
from g4debug.ledger.page_history import GIVES, TAKES, decided_by, last_of, said
from g4debug.tracers.page_table.checked_table import first_listed
from g4debug.tracers.page_table.facts import UNKNOWN

if TYPE_CHECKING:
    from g4debug.tracers.page_table.facts import Facts


def cause(facts: Facts) -> str:
    """The likely cause, in words."""
    batch = facts.of_batch
    if batch is not None:
        found = batch.wrong_index(facts.cell.row) or batch.wrong_length(facts.length)
        if found:
            return found
    if facts.checked.lists is not None and facts.record.beside:
        return _list_word(facts)
    special = {
        "row-too-short": _too_short,
        "use-after-free": _freed,
        "evicted-in-window": _evicted,
        "foreign-page": _foreign,
        "misplaced-page": _foreign,
        "full-index-in-swa-table": _untranslated,
    }.get(facts.kind)
    return special(facts) if special is not None else _wrong_cell(facts)


def _list_word(facts: Facts) -> str:
    return (
        f"{facts.record.beside} and the lengths of the batch do not agree: it was built for "
        "another batch, or overwritten after it was built; which of the two is not known"
    )


def _wrong_cell(facts: Facts) -> str:
    token, size = facts.token, facts.page_size
    it = "table" if facts.checked.lists is None else "list"
    if token is None:
        return "not known: req_to_token cannot be read any more"
    where = f"row {facts.request_row} of req_to_token"
    if token < 0 or facts.full_page >= facts.full_pages > 0:
        agrees = facts.value == facts.full_page or facts.pool_name == "swa"
        if agrees:
            return (
                f"req_to_token is wrong, and the {it} was built from it: {where} has token index "
                f"{token} there, which the full pool does not have. Who wrote it is not known"
            )
    if facts.full_page == 0:
        return (
            f"{where} has no token there: the row is longer than what was allocated for it, or "
            "that part of the row was cleared; which of the two is not known"
        )
    inner = facts.cell.position % size if facts.cell.position >= 0 else 0
    if facts.slot >= 0 and facts.slot != token + inner:
        so = f". The {it} was built from it" * (facts.cell.token in (facts.slot, facts.mapped))
        return (
            f"req_to_token is wrong: {where} has token index {facts.slot} for token "
            f"{facts.cell.position}, inside of a page that begins with token index {token}{so}. "
            "Who wrote it is not known"
        )
    right_place = facts.right_place
    known = facts.mapped != UNKNOWN and facts.right >= 0 and right_place >= 0
    if facts.pool_name == "swa" and known and facts.mapped != right_place:
        wrong = f"full_to_swa_index_mapping is wrong: {_said_of(facts)}"
        written = last_of(facts.history_of("full", facts.full_page), (*GIVES, "map", *TAKES))
        if written is not None:
            wrong += f". The last write of it that the ledger saw was {said(written)}"
        wrong += ". Who changed it after that is not known"
        built = facts.cell.token if facts.cell.position >= 0 else facts.value
        said_there = facts.mapped if facts.cell.position >= 0 else facts.mapped // size
        if built == said_there:
            return f"{wrong}. The {it} was built from it"
        return f"{wrong}. The {it} has yet another page, so it may be wrong in itself, too"
    if facts.right < 0:
        return "not known: the ledger does not know which page belongs there"
    agree = f"{where} (full page {facts.full_page})"
    if facts.pool_name == "swa":
        if not known:
            return f"not known: {agree} is as it should be, and the mapping cannot be read any more"
        agree += f" and the mapping (SWA page {facts.swa_page})"
    column = facts.own_column()
    if column >= 0:
        first = column * size
        return (
            f"the {it} is wrong, not the data it is built from: {agree} would give page "
            f"{facts.right}. The page in the cell is the request's own, of column {column} (tokens "
            f"{first}..{first + size - 1}): a wrong column was read or written"
        )
    return (
        f"the {it} is wrong, not the data it is built from: {agree} would give page {facts.right}. "
        "It was overwritten after it was built, or built from stale data; which of the two is not "
        "known"
    )


def _said_of(facts: Facts) -> str:
    """The mapping's entry, and the right one."""
    size, mapped, right = facts.page_size, facts.mapped, facts.right_place
    if mapped // size != right // size and mapped >= size:
        return (
            f"it says SWA page {mapped // size} for full page {facts.full_page}, which was handed "
            f"out together with SWA page {right // size}"
        )
    return (
        f"it says {mapped} for slot {facts.slot} of the full pool (page {facts.full_page}), which "
        f"was handed out together with slot {right} (SWA page {right // size})"
    )


def _untranslated(facts: Facts) -> str:
    if facts.of_full_list:
        entry = facts.cell.position - first_listed(facts.length, facts.checked.window)
        return (
            "the full layers' list is where the sliding layers' list belongs: entry "
            f"{entry} is the full pool's token of position {entry}, and the list of the last "
            f"{facts.checked.window} tokens has the one of position {facts.cell.position} there"
        )
    if facts.stale_state:
        return (
            "full-pool indices reached a sliding layer: the attention backend has "
            f"{facts.checked.adapter.swa_state(facts.checked.backend)}, "
            "while the pool it reads is a SWAKVPool, so the table was not translated"
        )
    return (
        "the cell holds a full-pool page where a SWA page belongs, although the backend "
        "translates its tables: the SWA table was overwritten, or this cell was never "
        "translated; which of the two is not known"
    )


def _too_short(facts: Facts) -> str:
    needed, columns, size = facts.value, facts.cell.column, facts.page_size
    kept = req_kv.holder(facts.request, req_kv.ALLOCATED)
    allocated = getattr(kept, req_kv.ALLOCATED, None)
    reads_on = "; the kernel reads on into the next row"
    if not isinstance(allocated, int):
        return (
            "seq_lens is too long, or the table too narrow; which of the two is not known, because "
            "it is not known how many tokens the request has" + reads_on
        )
    pages = -(-allocated // size)
    if needed > pages:
        return (
            f"the length is wrong: seq_lens asks for {needed} pages, but {allocated} tokens are "
            f"allocated for the request, which are {pages} pages" + reads_on
        )
    return (
        f"the table is too narrow: {allocated} tokens ({pages} pages) are allocated for the "
        f"request, and the table has {columns} columns: it was made for shorter requests, or the "
        "request is longer than the CUDA graph's static table" + reads_on
    )


def _freed(facts: Facts) -> str:
    page, rid = facts.full_page, facts.rid
    events = facts.history_of("full", page)
    freed = last_of(events, TAKES)
    given = last_of(events, GIVES)
    if given is None and freed is None:
        return (
            f"row {facts.request_row} of req_to_token is wrong: it names full page {page}, of "
            "which the ledger knows no hand-out. Who wrote it is not known"
        )
    own = facts.own_page()
    if own > 0 and own != page:
        return (
            f"row {facts.request_row} of req_to_token is wrong: it names full page {page}, and "
            f"page {own} was handed out for these tokens and is still held. Who wrote the row is "
            "not known"
        )
    if given is not None and given.request and rid and given.request != rid:
        return (
            f"page {page} was last handed out {said(given)}, not for this request: its row "
            "of req_to_token is wrong, or it has the page from the prefix cache, which gave it "
            "up; which of the two is not known" + (f". Freed {said(freed)}" if freed else "")
        )
    if freed is None:
        return "not known: the free of the page is older than its recorded history"
    return (
        f"the page was freed {said(freed, request=False)} while the request is still being served: "
        "look at that caller"
    )


def _evicted(facts: Facts) -> str:
    after = (
        "; these tokens have no mapping any more, so the sliding layers read page 0 or another "
        "request's KV"
    )
    page = facts.evicted_page()
    evicted = last_of(facts.history_of("swa", page), TAKES) if page > 0 else None
    if evicted is None:
        return "the SWA page was evicted too early; by whom is not known" + after
    decided = decided_by(evicted)
    return f"the SWA page was evicted {said(evicted, request=False)}: {decided}" + after


def _foreign(facts: Facts) -> str:
    it = facts.foreign
    if it is None:
        return "not known"
    if it.is_its_own:
        wrong = f"req_to_token is wrong: row {it.row} names a page of its own request there"
    elif it.owner:
        wrong = f"req_to_token is wrong: row {it.row} names a page of request {it.owner} there"
    else:
        wrong = f"req_to_token is wrong: row {it.row} names page {it.page} there"
    if it.proof:
        wrong += f" ({it.proof})"
    if it.own > 0:
        return (
            f"{wrong}. Page {it.own} was handed out for these tokens and is still held, but the "
            "row does not name it: the row was overwritten, or was never written with it; who "
            "wrote it is not known"
        )
    return (
        f"{wrong}, and the ledger knows of no page that was handed out to this request for these "
        "tokens: the allocation was written into another row, or never made; who wrote the row is "
        "not known"
    )
