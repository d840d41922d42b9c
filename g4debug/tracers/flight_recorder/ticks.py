"""A thread that calls a function once in a second, whatever the main thread does.

It needs the GIL for a moment, as every thread does: it is late where the main thread keeps it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("g4debug")


class Ticks:
    """on_tick: called each ``seconds``. A failure of it is logged, and ends the ticks."""

    def __init__(self, on_tick: Callable[[], None], seconds: float) -> None:
        self.on_tick, self.seconds = on_tick, seconds
        self._end = threading.Event()

    def start(self) -> None:
        """Begin. Raises RuntimeError if there can be no more threads."""
        self._end = threading.Event()
        threading.Thread(
            target=self._tick, args=(self._end,), name="g4debug-ticks", daemon=True
        ).start()

    def stop(self) -> None:
        self._end.set()

    def _tick(self, end: threading.Event) -> None:
        while not end.wait(self.seconds):
            try:
                self.on_tick()
            except Exception:
                logger.exception("g4debug: flight-recorder failed. Please report this.")
                return
