"""Asks SGLang's own structures whether a record of the page-table guard is true.

The guard compares a table with ``req_to_token``, which is SGLang's own, and with the page ledger
(:mod:`g4debug.sanitizer.confirm`). Where a row of ``req_to_token`` itself names a page that does
not belong there, the guard suspects that from what the ledger knows
(:mod:`g4debug.ledger.owners`), and SGLang is asked for a proof
(:mod:`g4debug.sanitizer.misplaced`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer.confirm import GIVEN_UP, Question, Unconfirmed
from g4debug.sanitizer.misplaced import Misplaced, misplaced
from g4debug.sanitizer.page_report import rid_of
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import Cell, CheckedTable


def confirm(checked: CheckedTable, cell: Cell, ledger: Ledger | None, recorder: Recorder) -> Cell:
    """The cell, with the answers of SGLang's structures. May wait. Raises Unconfirmed."""
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
    token = int(checked.rows[row, cell.column * checked.page_size])
    return row, token // checked.page_size


def _ask(cell: Cell, ask: Question) -> None:
    ask.is_served()
    if cell.kind is Kind.FREED:
        ask.is_free()
        return
    size = ask.holders.page_size
    if cell.position >= 0:  # an entry of a list is about one slot
        slot = ask.page * size + cell.position % size
        seen, mapped = cell.token, int(ask.holders.allocator.full_to_swa_index_mapping[slot])
    else:
        slot, seen, mapped = -1, cell.value, int(ask.holders.mapped(ask.full)[0])
    if cell.kind is not Kind.EVICTED:
        ask.is_mapped_elsewhere(seen, mapped, cell.expected, slot)
    # SGLang's own mapping has no SWA page for it either, although the window needs one. Since a
    # launch, the page may have left the window by right: there the table tells what was then.
    elif (mapped if cell.step < 0 else cell.value) != 0:
        raise Unconfirmed(f"SGLang's own mapping has a SWA page for full page {ask.page}", ask.page)


def _foreign(
    checked: CheckedTable, cell: Cell, ledger: Ledger | None, recorder: Recorder
) -> Misplaced:
    page = -1
    try:
        row, page = _named(checked, cell)
        rid = rid_of(recorder, cell.step, row)
        token = cell.column * checked.page_size
        return misplaced(ledger, row, token, page, rid, checked.rows)
    except (RuntimeError, IndexError) as e:
        raise Unconfirmed(f"they cannot be read: {e}".splitlines()[0], page) from e
