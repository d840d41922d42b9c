"""Counts what goes wrong now and then, and forgets it with time.

A suspicion that SGLang's own structures do not confirm is rare and harmless. One after the other it
means that something of ours is wrong: then the judgement that makes them is switched off. So what
counts is how often it happens, and not for how long the server has run.
"""

from __future__ import annotations

from g4debug.findings.status import Clock

FORGETS = 100_000  # steps after which one of them is forgotten: some half an hour of a busy server


class Doubts:
    """How many there are. One is forgotten in every FORGETS steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._since = 0  # the step from which the next one is forgotten

    def add(self) -> int:
        """One more. Returns how many there are now."""
        step = self._clock.step
        forgotten = min(self._count, max(0, step - self._since) // FORGETS)
        self._count -= forgotten
        self._since = self._since + forgotten * FORGETS if self._count else step
        self._count += 1
        return self._count
