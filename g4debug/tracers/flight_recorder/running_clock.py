"""The time in which this process runs, without the time in which it is suspended.

``docker pause`` and SIGSTOP stop all threads of a process, and no clock of the system leaves that
time out. So a thread ticks (:mod:`g4debug.tracers.flight_recorder.ticks`), and of the time between
two ticks only so much counts.
"""

from __future__ import annotations

import time

TICK = 1.0  # seconds between two ticks
MOST = 1.5  # seconds that count between two ticks; a busy machine is late, too
LATE = 5.0  # seconds between two ticks, after which the process may have been suspended


class RunningClock:
    """Without ticks it stands still, MOST seconds behind its last one.

    late: how many ticks came more than LATE seconds after the one before.
    """

    def __init__(self) -> None:
        self.late = 0
        # Seconds so far, and when that was. One value, because another thread reads it.
        self._last = (0.0, time.monotonic())

    def tick(self) -> None:
        """Called by one thread, once in TICK seconds."""
        now = time.monotonic()
        self.late += now - self._last[1] > LATE
        self._last = (self.seconds(now), now)

    def seconds(self, now: float) -> float:
        """Seconds in which this process has run. now: of the monotonic clock."""
        ran, at = self._last
        return ran + min(max(now - at, 0.0), MOST)
