"""What several tracers read off a page's history for a report, above all for its cause."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from g4debug.findings.record import PageEvent
from g4debug.ledger.ledger import Ledger

GIVES = ("extend", "decode", "alloc")  # events by which a page gets a holder
TAKES = ("free", "evict", "clear")  # and by which it loses it


logger = logging.getLogger("g4debug")


def settle(ledger: Ledger | None, tracer: str) -> None:
    """Let the ledger enter all that has happened, before it is asked."""
    if ledger is None:
        return
    try:
        ledger.settle(wait=True)
    except RuntimeError as e:  # the CUDA context is dead, so the events up to now must do
        logger.warning("g4debug: %s: the allocators' last events are lost (%s)", tracer, e)


def event_line(event: PageEvent) -> str:
    """``step 12: extend for a1b2 (common.py:441 alloc_for_extend)``."""
    whom = f" for {event.request}" if event.request else ""
    by = f" ({event.caller})" if event.caller else ""
    note = f": {event.note}" if event.note else ""
    return f"step {event.step}: {event.kind}{whom}{by}{note}"


def last_of(events: tuple[PageEvent, ...], kinds: Iterable[str]) -> PageEvent | None:
    """The latest event of these kinds, None if there is none."""
    wanted = tuple(kinds)
    return next((e for e in reversed(events) if e.kind in wanted), None)


def said(event: PageEvent, request: bool = True) -> str:
    """``in step 12 by common.py:441 alloc_for_extend, for request a1b2``."""
    by = f" by {event.caller}" if event.caller else ""
    whom = f", for request {event.request}" if request and event.request else ""
    return f"in step {event.step}{by}{whom}"


def decided_by(event: PageEvent) -> str:
    """Who decided on the eviction of a SWA page, from its caller."""
    if "evict_swa" in event.caller:
        return (
            "the request's own eviction went too far: look at the length that _evict_swa was "
            "given, and at swa_evicted_seqlen"
        )
    if "radix_cache" in event.caller:
        return (
            "the prefix cache gave it up: look at swa_lock_ref of the node, and at how much the "
            "request locked (inc_lock_ref)"
        )
    return "why that caller evicts is not known; SGLang's own are _evict_swa and the prefix cache"
