"""Asks SGLang's own structures whether what was seen of a write is real.

What rests on the page ledger is confirmed by what :mod:`g4debug.sanitizer.confirm` asks, by the
rows of other requests, and by the prefix cache.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer.confirm import GIVEN_UP, Question, Unconfirmed, rests_on_ledger
from g4debug.sanitizer.page_facts import rid_of
from g4debug.tracers.kv_writes.check import Kind
from g4debug.tracers.kv_writes.checked_writes import CheckedWrites, Write


def confirm(
    checked: CheckedWrites | None, write: Write, ledger: Ledger | None, recorder: Recorder
) -> Write:
    """The write. May wait. Raises Unconfirmed if SGLang's structures do not say the same."""
    if checked is None or not rests_on_ledger(write.kind, checked.truth):
        return write
    page = write.full // checked.page_size
    if ledger is None or ledger.holders is None:
        if write.kind.record.suspicion:
            raise Unconfirmed("there is no page ledger", page)
        return write
    if ledger.broken:
        raise Unconfirmed(GIVEN_UP, page)
    with suppress(RuntimeError):  # the device is lost
        asked = Question(ledger, ledger.holders, page, write.request, write.step)
        _ask(checked.page_size, write, asked, recorder)
    return write


def _ask(size: int, write: Write, ask: Question, recorder: Recorder) -> None:
    ask.is_served()
    holders = ask.holders
    if write.kind is Kind.FREED:
        ask.is_free()
    elif write.kind is Kind.CACHED:
        if holders.scheduler is not None and not np.isin(ask.full, holders.cached()).any():
            raise Unconfirmed(f"the prefix cache does not hold page {ask.page}", ask.page)
    elif write.kind is Kind.FOREIGN:
        why = _not_anothers(size, write, ask, recorder)
        if why:
            raise Unconfirmed(why, ask.page)
    else:
        mapped = int(holders.allocator.full_to_swa_index_mapping[write.full])
        if mapped == write.value and mapped // size == write.expected // size:
            why = "SGLang's own mapping names that slot of the right page"
            raise Unconfirmed(why, harmless=True)
        ask.is_mapped_elsewhere(write.value, mapped, write.expected // size)


def _not_anothers(size: int, write: Write, ask: Question, recorder: Recorder) -> str:
    """Why the page is not another request's. '' if two rows name it, which is wrong anyway."""
    page, ledger, pool = ask.page, ask.ledger, ask.ledger.pools.get("full")
    if pool is None or ledger.owners is None or ask.holders.scheduler is None:
        return "the page ledger does not know it"
    rows = ask.holders.scheduler.req_to_token_pool.req_to_token
    if int(rows[write.request, write.position]) != write.full:
        return f"row {write.request} of req_to_token does not name it any more"
    ledger.settle(wait=True)
    owner, row = str(pool.owner[page]), int(ledger.owners.pages[page])
    begin, rid = int(pool.position[page]), rid_of(recorder, write.step, write.request)
    if not owner or owner == rid or begin < 0 or not 0 < row < len(rows) or row == write.request:
        return f"page {page} is not known to be another request's"
    if int(rows[row, begin]) // size != page:
        return f"row {row} of request {owner} does not name page {page}"
    return ""
