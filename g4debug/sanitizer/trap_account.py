"""What a tracer says of its trap buffer besides the findings: what is in none of them."""

from __future__ import annotations

import logging

from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.base import Context

FIRST = 10  # from so many on, a line about them is logged; then at ten times as many, and so on
logger = logging.getLogger("g4debug")


class Account:
    """The account of one tracer's trap buffer.

    bad: what its kernel counts, in the plural ("bad cells"). lost: after an error of the device
    nothing more can be read or checked.
    """

    def __init__(self, context: Context, bad: str) -> None:
        self.context, self.bad = context, bad
        self.lost = False
        self._spoilt: set[int] = set()  # slots that were reported as such
        self._next = FIRST

    def give(self, trap: TrapBuffer) -> None:
        """Say what was counted and is in no finding, and what of the trap buffer is unusable."""
        for slot in trap.spoilt - self._spoilt:
            self._spoilt.add(slot)
            self.context.limit(
                f"not what is seen for slot {slot} of its trap buffer",
                "somebody else wrote into that host memory",
            )
        try:
            merged = trap.merged()
        except RuntimeError as e:
            self.lost = True
            self.context.off(f"the device is lost: {e}")
            return
        if merged >= self._next:
            self._next = 10 ** len(str(merged))
            logger.warning(
                "g4debug: %s: %d %s so far are in no finding of their own: they were seen before "
                "the host had read the last one",
                self.context.tracer_id,
                merged,
                self.bad,
            )
