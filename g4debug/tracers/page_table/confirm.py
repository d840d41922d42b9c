"""Asks SGLang's own structures whether what the guard saw in a table is real.

The guard compares a table with ``req_to_token``, which is SGLang's own, and with the shadow of the
page ledger, which is ours and may be wrong. What rests on the shadow is confirmed here by the free
lists and by the full-to-SWA mapping. If a device is lost, they cannot be asked any more. Then the
guard is believed, because the server is dead anyway.
"""

from __future__ import annotations

import numpy as np

from g4debug.ledger.holders import Holders
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import Cell, Launch


def is_real(launch: Launch | None, cell: Cell, ledger: Ledger | None) -> bool:
    """True if the finding needs no ledger, or SGLang's structures confirm it. May wait."""
    if launch is None or ledger is None or ledger.holders is None or not _rests_on(launch, cell):
        return True
    if cell.position >= 0 and cell.value == cell.expected:
        return True  # the right page, and in it another token: the ledger knows pages only
    if ledger.broken:
        return False
    try:
        return _confirmed(launch, cell, ledger, ledger.holders)
    except RuntimeError:  # the device is lost
        return True


def has_ended(launch: Launch, cell: Cell, ledger: Ledger) -> bool:
    """True if no request holds the row of ``req_to_token`` of this cell any more."""
    holders = ledger.holders
    if cell.step >= 0 or launch.truth is None or holders is None or holders.scheduler is None:
        return False  # of a launch's copy it is known who had left, see as_of_launch.py
    row = int(launch.truth.req_pool_indices[cell.row])
    return not holders.is_served(row, ledger.requests.values())


def _rests_on(launch: Launch, cell: Cell) -> bool:
    """True if only the shadow says that this cell is wrong."""
    if launch.truth is None or launch.truth.shadow is None:
        return False
    kind = cell.kind.record
    if kind.suspicion:  # the report asks SGLang's own tables, see foreign.py
        return False
    return bool(kind.confirmed_by) and (launch.truth.swa or not kind.in_swa)


def _confirmed(launch: Launch, cell: Cell, ledger: Ledger, holders: Holders) -> bool:
    assert launch.truth is not None
    if cell.step >= 0:
        full = np.array([cell.full], dtype=np.int64)
    else:
        row = int(launch.truth.req_pool_indices[cell.row])
        token = int(launch.truth.req_to_token[row, cell.column * holders.page_size])
        full = np.array([token // holders.page_size], dtype=np.int64)
    if has_ended(launch, cell, ledger):
        return False  # it ended since then, so that its pages are free now by right
    if cell.kind is Kind.FREED:
        if holders.is_free("full", full).any() or np.isin(full, holders.deferred()).any():
            return True
        return cell.step >= 0 and _is_named_twice(holders, ledger, int(full[0]))
    mapped = int(holders.mapped(full)[0])
    if cell.kind is Kind.EVICTED:
        # SGLang's own mapping has no SWA page for it either, although the window needs one. Since a
        # launch, the page may have left the window by right: there the table tells what was then.
        return (mapped if cell.step < 0 else cell.value) == 0
    # Since the launch, the page may have left the window, and then it has no SWA page any more.
    if mapped != cell.value and (mapped > 0 or cell.step < 0):
        return True  # the table is not what SGLang's own mapping says
    if holders.scheduler is None:
        return True
    given = np.array([cell.expected], dtype=np.int64)
    return holders.mapping_contradicts(full, given, ledger.requests.values())


def _is_named_twice(holders: Holders, ledger: Ledger, page: int) -> bool:
    """Two rows name a page that was free when the forward was launched: it has a new owner."""
    if holders.scheduler is None:
        return True
    cells, maybe = holders.in_rows(holders.rows(ledger.requests.values()))
    return int((cells == page).sum()) + int((maybe == page).sum()) > 1
