"""Asks SGLang's own structures whether what was seen of a write is real.

What rests on ``req_to_token`` alone, or on the locations themselves, needs nobody else: both are
SGLang's. What rests on the books of the ledger is confirmed here, by the free lists, the
full-to-SWA mapping, the rows of other requests and the prefix cache. If a device is lost they
cannot be asked any more. Then what was seen is believed, because the server is dead anyway.
"""

from __future__ import annotations

import numpy as np

from g4debug.findings.steps import Recorder
from g4debug.ledger.holders import Holders
from g4debug.ledger.ledger import Ledger
from g4debug.tracers.kv_writes.check import Kind
from g4debug.tracers.kv_writes.checked_writes import Launch, Write, rid_of

ENDED = "its request has ended since then"
OTHER_SLOT = "SGLang's own mapping names that slot of the right page"
HARMLESS = (ENDED, OTHER_SLOT)  # reasons that do not say that the ledger is wrong


def confirm(launch: Launch | None, write: Write, ledger: Ledger | None, recorder: Recorder) -> str:
    """'' if the finding is real; else why it is not reported. May wait."""
    if launch is None or not _rests_on_books(launch, write):
        return ""
    if ledger is None or ledger.holders is None:
        return "there is no page ledger" if write.kind.record.suspicion else ""
    if ledger.broken:
        return "the page ledger was given up"
    try:
        return _asked(launch, write, ledger, ledger.holders, recorder)
    except RuntimeError:  # the device is lost
        return ""


def _rests_on_books(launch: Launch, write: Write) -> bool:
    """True if only the ledger says that this location is wrong."""
    if launch.truth is None or launch.truth.shadow is None:
        return False
    kind = write.kind.record
    return bool(kind.confirmed_by) and (launch.truth.swa or not kind.in_swa)


def _asked(
    launch: Launch, write: Write, ledger: Ledger, holders: Holders, recorder: Recorder
) -> str:
    requests = ledger.requests.values()
    size = launch.page_size
    page = write.other // size
    full = np.array([page], dtype=np.int64)
    live = write.step < 0 and holders.scheduler is not None
    if live and not holders.is_served(write.request, requests):
        return ENDED
    if write.kind is Kind.FREED:
        if holders.is_free("full", full).any() or np.isin(full, holders.deferred()).any():
            return ""
        if write.step >= 0 and _rows_that_name(holders, ledger, page) > 1:
            return ""  # it was free when the forward was launched, and has a new owner now
        return f"full page {page} is not in SGLang's free list"
    if write.kind is Kind.CACHED:
        if holders.scheduler is None or np.isin(full, holders.cached()).any():
            return ""
        return f"the prefix cache does not hold page {page}"
    if write.kind is Kind.FOREIGN:
        return _foreign(write, page, size, ledger, holders, recorder)
    mapped = int(holders.allocator.full_to_swa_index_mapping[write.other])
    if mapped == write.value and mapped // size == write.expected // size:
        return OTHER_SLOT
    # Since the launch, the page may have left the window, and then it has no SWA page any more.
    if mapped != write.value and (mapped > 0 or write.step < 0):
        return ""  # it is not what SGLang's own mapping says
    if holders.scheduler is None:
        return ""
    # It is what the mapping says. Is the mapping wrong, or the ledger?
    given = np.array([write.expected // size], dtype=np.int64)
    if holders.mapping_contradicts(full, given, requests):
        return ""
    return f"SGLang's own mapping has SWA page {mapped // size} for full page {page}"


def _foreign(
    write: Write, page: int, size: int, ledger: Ledger, holders: Holders, recorder: Recorder
) -> str:
    """Two rows that name one page which the prefix cache lent to neither are wrong."""
    pool = ledger.pools.get("full")
    if pool is None or ledger.owners is None or holders.scheduler is None:
        return "the page ledger does not know it"
    table = holders.scheduler.req_to_token_pool.req_to_token
    if int(table[write.request, write.position]) != write.other:
        return f"row {write.request} of req_to_token does not name it any more"
    ledger.settle(wait=True)
    owner, row = str(pool.owner[page]), int(ledger.owners.pages[page])
    begin = int(pool.position[page])
    rid = rid_of(recorder, write)
    if not owner or owner == rid or begin < 0 or not 0 < row < len(table) or row == write.request:
        return f"page {page} is not known to be another request's"
    if int(table[row, begin]) // size != page:
        return f"row {row} of request {owner} does not name page {page}"
    return ""


def _rows_that_name(holders: Holders, ledger: Ledger, page: int) -> int:
    if holders.scheduler is None:
        return 2
    cells, maybe = holders.in_rows(holders.rows(ledger.requests.values()))
    return int((cells == page).sum()) + int((maybe == page).sum())
