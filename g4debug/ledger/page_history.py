"""The log of the pages' last events, and the sentences that reports draw from it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.index_transport import IndexTransport

KEPT = 16_384  # events kept of all pages together
SHOWN = 8  # pages named in an event
TAIL = 2048  # last events of all pages that go into a dump: some 50 ms to write
GIVES = ("extend", "decode", "alloc")  # events by which a page gets a holder
TAKES = ("free", "evict", "clear")  # and by which it loses it
logger = logging.getLogger("g4debug")


class EventLog:
    """The last ``KEPT`` events, oldest first. ``serial`` is the number of the next one.

    ``Ledger.enter`` adds to both itself, because it does so for each event. also: gets each event.
    """

    def __init__(self, pools: Mapping[str, PoolLedger]) -> None:
        self.events: deque[PageEvent] = deque(maxlen=KEPT)
        self.serial = 0
        self.also: Callable[[PageEvent], None] | None = None
        self._pools = pools

    def last(self, count: int = TAIL) -> tuple[PageEvent, ...]:
        """The last events of all pages, oldest first."""
        return tuple(self.events)[-count:]

    def history(self, pool: str, page: int) -> tuple[PageEvent, ...]:
        """The last events of one page, oldest first. In each, the page comes first."""
        books = self._pools.get(pool)
        if books is None or not 0 <= page < books.pages:
            return ()
        oldest = self.serial - len(self.events)
        known = sorted(n for n in books.recent[page].tolist() if n >= oldest)
        return tuple(about(self.events[n - oldest], page) for n in known)

    def last_naming(self, pool: str, index: int, kinds: Iterable[str]) -> PageEvent | None:
        """The last event of these kinds that names an index, which may be no page of the pool."""
        wanted = tuple(kinds)
        events = (e for e in reversed(self.events) if e.kind in wanted and e.pool == pool)
        return next((e for e in events if index in e.pages), None)


class HasTransport(Protocol):
    """The ledger."""

    transport: IndexTransport


def settle(ledger: HasTransport | None, tracer: str) -> None:
    """Let the ledger enter all that has happened, before it is asked."""
    if ledger is None or not ledger.transport.waiting:
        return
    try:
        ledger.transport.settle(wait=True)
    except RuntimeError as e:  # the CUDA context is dead, so the events up to now must do
        logger.warning("g4debug: %s: the allocators' last events are lost (%s)", tracer, e)


def about(event: PageEvent, page: int) -> PageEvent:
    """The event, with this page first."""
    return replace(event, pages=(page, *(p for p in event.pages if p != page))[:SHOWN])


def event_line(event: PageEvent) -> str:
    """``step 12: extend for a1b2 (common.py:441 alloc_for_extend)``."""
    whom = f" for {event.request}" if event.request else ""
    by = f" ({event.caller})" if event.caller else ""
    note = f": {event.note}" if event.note else ""
    return f"step {event.step}: {event.kind}{whom}{by}{note}"


def short(events: Iterable[PageEvent]) -> tuple[str, ...]:
    """``step 12: extend a1b2 common.py:441 alloc_for_extend``, for each event."""
    return tuple(f"step {e.step}: {e.kind} {e.request} {e.caller}".rstrip() for e in events)


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
    """The likely reason for the eviction of a SWA page, from the caller."""
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
