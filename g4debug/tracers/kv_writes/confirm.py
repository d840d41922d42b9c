"""Asks SGLang's own structures whether what was seen of a write is real.

What rests on the page ledger is confirmed by what :mod:`g4debug.sanitizer.confirm` asks, by the
rows of other requests, and by the prefix cache.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer.confirm import (
    GIVEN_UP,
    Question,
    Unconfirmed,
    other_row,
)
from g4debug.sanitizer.page_report import rid_of
from g4debug.tracers.kv_writes.check import Kind
from g4debug.tracers.kv_writes.checked_writes import CheckedWrites, Write


def confirm(
    checked: CheckedWrites, write: Write, ledger: Ledger | None, recorder: Recorder
) -> Write:
    """The write. May wait. Raises Unconfirmed if SGLang's structures do not say the same."""
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
        _ask_of_rows(size, write, ask, recorder)
    else:
        mapped = int(holders.allocator.full_to_swa_index_mapping[write.full])
        if mapped == write.value and mapped // size == write.expected // size:
            why = "SGLang's own mapping names that slot of the right page"
            raise Unconfirmed(why, harmless=True)
        ask.is_mapped_elsewhere(write.value, mapped, write.expected // size)


def _ask_of_rows(size: int, write: Write, ask: Question, recorder: Recorder) -> None:
    """Is it true that another request's row names the page, too?"""
    if ask.holders.scheduler is None:
        raise Unconfirmed("the page ledger does not know it", ask.page)
    rows = ask.holders.scheduler.req_to_token_pool.req_to_token
    if int(rows[write.request, write.position]) != write.full:
        why = f"row {write.request} of req_to_token does not name it any more"
        raise Unconfirmed(why, ask.page)
    ask.ledger.settle(wait=True)
    rid = rid_of(recorder, write.step, write.request)
    _, row, _ = other_row(ask.ledger, ask.page, rid, rows, size)
    if row == write.request:
        raise Unconfirmed(f"page {ask.page} is not known to be another request's", ask.page)
