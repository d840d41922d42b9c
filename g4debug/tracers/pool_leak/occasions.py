"""Two reasons to count the pages at once: a sign that some were lost, and a server that stands.

Neither is a finding. A request may rightly be given pages for tokens that it had pages for, and a
server may wait for many things. Only the count tells.
"""

from __future__ import annotations

import time
from collections import deque

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import Pages, PoolLedger

KEPT = 256  # requests between two looks at them
STALLED = 5.0  # seconds without a step, while requests wait


class TakenAgain:
    """Requests that were given pages for tokens that they hold pages for.

    A chunked prompt that begins at its first token again does that (upstream #36855): nobody owns
    the pages of the chunks before. So does, for a good reason, a retracted request of which the
    prefix cache has kept more than it gives back.
    """

    def __init__(self) -> None:
        # (pool, the position that the request had got to, the first of its new pages)
        self._given: deque[tuple[PoolLedger, int, int]] = deque(maxlen=KEPT)

    def listen(self, pool: PoolLedger, event: PageEvent, pages: Pages) -> None:
        """Called before the ledger enters an extend. Costs the same, however many pages it has."""
        if not event.request or not len(pages):
            return
        last = pool.tails.get(event.request, 0)
        if last and pool.held[last] and pool.owner[last] == event.request:
            self._given.append((pool, int(pool.position[last]), int(pages[0])))

    def seen(self) -> bool:
        """True if there was such a request since the last call."""
        given = list(self._given)
        self._given.clear()
        return any(
            0 < page < pool.pages and 0 <= pool.position[page] <= before
            for pool, before, page in given
        )


class Stall:
    """A server that runs no step although it has requests."""

    def __init__(self) -> None:
        self._step = -1  # the last one that there was
        self._since = 0.0
        self._told = True

    def seen(self, step: int) -> bool:
        """Called again and again while no batch can be run: True once for each stall."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._since, self._told = step, now, False
        if self._told or now - self._since < STALLED:
            return False
        self._told = True
        return True
