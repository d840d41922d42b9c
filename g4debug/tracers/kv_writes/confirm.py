"""Asks SGLang's own structures whether a record of a write is true.

What rests on the page ledger is confirmed by what :mod:`g4debug.sanitizer.confirm` asks, by the
rows of other requests, and by the prefix cache.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import numpy as np

from g4debug.findings.steps import Recorder
from g4debug.ledger.ledger import Ledger
from g4debug.sanitizer.confirm import GIVEN_UP, Question, Unconfirmed
from g4debug.sanitizer.misplaced import misplaced
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
        return _ask(checked.page_size, write, asked, recorder)
    return write


def _ask(size: int, write: Write, ask: Question, recorder: Recorder) -> Write:
    ask.is_served()
    holders = ask.holders
    if write.kind is Kind.FREED:
        ask.is_free()
    elif write.kind is Kind.CACHED:
        if holders.scheduler is not None and not np.isin(ask.full, holders.cached()).any():
            # It rests on cache_protected_len, and says nothing of whose the page is.
            tables = f"the prefix cache does not hold page {ask.page}"
            why = f"SGLang's own tables do not confirm it ({tables})"
            raise Unconfirmed(why, ask.page, harmless=True)
    elif write.kind is Kind.FOREIGN:
        return _of_rows(write, ask, recorder)
    else:
        mapped = int(holders.allocator.full_to_swa_index_mapping[write.full])
        right = mapped == write.value and mapped // size == write.expected // size
        known = holders.scheduler is not None
        if right and not (known and holders.wrong_slot(write.full, ask.ledger.requests.values())):
            why = "SGLang's own mapping names that slot of the right page"
            raise Unconfirmed(why, harmless=True)
        ask.is_mapped_elsewhere(write.value, mapped, write.expected // size, write.full)
    return write


def _of_rows(write: Write, ask: Question, recorder: Recorder) -> Write:
    """Is it true that the page does not belong into the request's row there?"""
    if ask.holders.scheduler is None:
        raise Unconfirmed("the page ledger does not know it", ask.page)
    rows = ask.holders.scheduler.req_to_token_pool.req_to_token
    rid = rid_of(recorder, write.step, write.request)
    found = misplaced(ask.ledger, write.request, write.position, ask.page, rid, rows)
    return dataclasses.replace(write, foreign=found)
