"""Asks SGLang's own structures whether what the guard saw in a table is real.

The guard compares a table with ``req_to_token``, which is SGLang's own, and with the page ledger
(:mod:`g4debug.sanitizer.confirm`). Where a row of ``req_to_token`` itself names another request's
page, the guard suspects that from what the ledger knows (:mod:`g4debug.ledger.owners`). Here it is
held against SGLang: how much of the request lies in the prefix cache, and whether the other
request's own row names the page, too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from g4debug.findings.steps import Recorder
from g4debug.hooking import req_kv
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.owners import cached_tokens
from g4debug.sanitizer.confirm import (
    GIVEN_UP,
    Question,
    Unconfirmed,
    other_row,
)
from g4debug.sanitizer.page_report import rid_of
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import Cell, CheckedTable, Foreign


def confirm(checked: CheckedTable, cell: Cell, ledger: Ledger | None, recorder: Recorder) -> Cell:
    """The cell, and what SGLang's structures say of it. May wait. Raises Unconfirmed."""
    if cell.kind is Kind.FOREIGN:
        return replace(cell, foreign=_foreign(checked, cell, ledger, recorder))
    if ledger is None or ledger.holders is None:
        return cell
    if cell.position >= 0 and cell.value == cell.expected:
        return cell  # the right page, and in it another token: the ledger knows pages only
    if ledger.broken:
        raise Unconfirmed(GIVEN_UP)
    with suppress(RuntimeError):  # the device is lost
        row, page = _named(checked, cell)
        _ask(cell, Question(ledger, ledger.holders, page, row, cell.step))
    return cell


def _named(checked: CheckedTable, cell: Cell) -> tuple[int, int]:
    """The row of ``req_to_token``, and the page of the full pool that it has for the cell."""
    if cell.step >= 0:  # as it was then; the live row may be another request's by now
        return cell.request, cell.full
    row = int(checked.req_pool_indices[cell.row])
    token = int(checked.backend.req_to_token[row, cell.column * checked.page_size])
    return row, token // checked.page_size


def _ask(cell: Cell, ask: Question) -> None:
    ask.is_served()
    if cell.kind is Kind.FREED:
        ask.is_free()
        return
    mapped = int(ask.holders.mapped(ask.full)[0])
    if cell.kind is not Kind.EVICTED:
        ask.is_mapped_elsewhere(cell.value, mapped, cell.expected)
    # SGLang's own mapping has no SWA page for it either, although the window needs one. Since a
    # launch, the page may have left the window by right: there the table tells what was then.
    elif (mapped if cell.step < 0 else cell.value) != 0:
        raise Unconfirmed(f"SGLang's own mapping has a SWA page for full page {ask.page}")


def _foreign(
    checked: CheckedTable, cell: Cell, ledger: Ledger | None, recorder: Recorder
) -> Foreign:
    page = -1
    try:
        row, page = _named(checked, cell)
        found = _owned_by_another(checked, cell, row, page, ledger, recorder)
    except (RuntimeError, IndexError) as e:
        found = f"they cannot be read: {e}".splitlines()[0]
    if isinstance(found, str):
        raise Unconfirmed(found, page)
    return found


def _owned_by_another(
    checked: CheckedTable,
    cell: Cell,
    row: int,
    page: int,
    ledger: Ledger | None,
    recorder: Recorder,
) -> Foreign | str:
    """What SGLang's rows say, or why it is not confirmed."""
    pool = ledger.pools.get("full") if ledger is not None else None
    if ledger is None or pool is None or ledger.owners is None or ledger.broken:
        return GIVEN_UP
    size, rows = checked.page_size, checked.backend.req_to_token
    at = cell.column * size
    if not 0 < page < pool.pages or int(rows[row, at]) // size != page:
        return f"row {row} of req_to_token does not name it any more"
    ledger.settle(wait=True)
    rid = rid_of(recorder, cell.step, row)
    request = ledger.requests.get(rid)
    if request is None:
        return f"the request of row {row} is not known"
    if cached_tokens(request) > at:
        return f"token {at} of request {rid} lies in the prefix cache"
    owner, owner_row, token = other_row(ledger, page, rid, rows, size)
    holder = ledger.requests.get(owner)
    if holder is None or req_kv.row(holder) != owner_row:
        return f"request {owner} does not hold row {owner_row} any more"
    if token >= req_kv.allocated(holder):
        return f"request {owner} has no room for token {token} any more"
    own = ((pool.owner == rid) & (pool.position == at) & pool.held).nonzero()[0]
    found = int(own[-1]) if len(own) else -1
    return Foreign(row, rid, page, owner, owner_row, token // size, found)
