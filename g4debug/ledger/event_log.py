"""The event log: the last events of all pages, from which each page's history is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import PoolLedger

KEPT = 16_384  # events kept of all pages together
SHOWN = 8  # pages named in an event
TAIL = 256  # last events of all pages that go into a dump


class EventLog:
    """The last ``KEPT`` events, oldest first. ``serial`` is the number of the next one.

    ``Ledger.enter`` adds to both itself: it does so for each event.
    """

    def __init__(self) -> None:
        self.events: deque[PageEvent] = deque(maxlen=KEPT)
        self.serial = 0

    def last(self, count: int = TAIL) -> tuple[PageEvent, ...]:
        """The last events of all pages, oldest first."""
        return tuple(self.events)[-count:]

    def history(self, pool: PoolLedger, page: int) -> tuple[PageEvent, ...]:
        """The last events of one page, oldest first. In each, the page comes first."""
        oldest = self.serial - len(self.events)
        events = (self.events[n - oldest] for n in pool.serials(page) if n >= oldest)
        return tuple(
            replace(e, pages=(page, *(p for p in e.pages if p != page))[:SHOWN]) for e in events
        )

    def last_naming(self, pool: str, index: int, kinds: Iterable[str]) -> PageEvent | None:
        """The last event of these kinds that names an index, which may be no page of the pool."""
        wanted = tuple(kinds)
        events = (e for e in reversed(self.events) if e.kind in wanted and e.pool == pool)
        return next((e for e in events if index in e.pages), None)
