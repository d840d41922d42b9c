"""Says that the engine is paused, for how long, and who waits meanwhile. It is no finding.

``pause_generation`` without ``continue_generation`` looks like a hang to every client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from g4debug.tracers.flight_recorder import work

FORGOTTEN = 600.0  # seconds in which the loop turned; then the log has a warning, once in a pause
logger = logging.getLogger("g4debug")


class Pause:
    """leads: whether this rank tells what all of them see.

    began: when this pause was first seen, in the time in which the loop turns; None: none.
    """

    def __init__(self, leads: Callable[[], bool]) -> None:
        self.leads = leads
        self.began: float | None = None
        self._warned = False

    def look(self, scheduler: Any, loop: float) -> None:
        """Called once in a second at most. loop: the time in which the loop turned, in seconds."""
        if not work.paused(scheduler):
            self.began, self._warned = None, False
            return
        if self.began is None:
            self.began = loop
        if not self._warned and loop - self.began >= FORGOTTEN and work.everyone(scheduler):
            self._warned = True
            if self.leads():
                logger.warning("g4debug: %s", self.line(scheduler, loop))

    def line(self, scheduler: Any, loop: float) -> str:
        """The pause of a scheduler that is paused, in a sentence."""
        items = work.everyone(scheduler)
        count = len(items) + len(work.between(scheduler, items))
        who = f"{count or 'no'} request{'s wait' if count > 1 else ' waits'}"
        seconds = loop - (loop if self.began is None else self.began)
        return (
            f"the engine has been paused for {seconds:,.0f} s (pause_generation), and {who}: none "
            "is served until somebody calls continue_generation"
        )
