"""Warns of requests that wait for something outside of the scheduler for too long.

The other server of disaggregation, a storage, a grammar: whether it still works cannot be known
here, so this is no finding. SGLang gives up on most of them after 300 s, by its own settings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from g4debug.hooking import req_kv
from g4debug.tracers.flight_recorder.waits import Wait
from g4debug.tracers.flight_recorder.work import Place

PATIENCE = 330.0  # seconds; a little more than what SGLang's own limits are by default
QUIET = 3600.0  # seconds; the most between two warnings
FOR = {
    Place.PEER: "for the other server of disaggregation",
    Place.STORAGE: "for a prefix from storage",
    Place.GRAMMAR: "for a grammar to be compiled",
    Place.STAGING: "for KV to be copied to the host (HiSparse)",
    Place.HELD: "for continue_generation, after a pause had retracted them",
}
logger = logging.getLogger("g4debug")


class OutsideWaits:
    """leads: whether this rank tells what all of them see. lines: what doctor says now."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self.leads = leads
        self.lines: list[str] = []
        self._quiet = 0.0
        self._quiet_until = 0.0  # in the time in which the loop turns

    def look(self, waits: Iterable[Wait], loop: float) -> None:
        """loop: the time in which the loop turned, in seconds."""
        all_, self.lines, new = list(waits), [], []
        queued = sum(w.place in (Place.QUEUE, Place.RETRACTED) for w in all_)
        for place, what in FOR.items():
            long = [w for w in all_ if w.place is place and loop - w.since >= PATIENCE]
            if long:
                self.lines.append(_line(long, what, loop, queued))
                new += [w for w in long if not w.warned]
        if new and loop >= self._quiet_until:
            self._quiet = min(QUIET, max(PATIENCE, 2 * self._quiet))
            self._quiet_until = loop + self._quiet
            for wait in new:
                wait.warned = True
            for line in self.lines if self.leads() else ():
                logger.warning("g4debug: %s", line)


def _line(long: list[Wait], what: str, loop: float, queued: int) -> str:
    first = min(long, key=lambda w: w.since)
    more = len(long) - 1
    who = f"request {first.name} has waited {loop - first.since:,.0f} s {what}"
    if more:
        who += f", and {more} more for at least {PATIENCE:.0f} s"
    holds = sum(_tokens(w.request) for w in long)
    kept = f"; {'they hold' if more else 'it holds'} {holds:,} tokens of KV" if holds else ""
    behind = ""
    if holds and queued and first.place is Place.PEER:
        wait = "waits" if queued == 1 else "wait"
        behind = f"; {queued} {wait} in the queue, maybe for these, and no hang is told meanwhile"
    return f"{who}{kept}{behind}"


def _tokens(request: object) -> int:
    """The tokens of the pools that are allocated to a request."""
    if req_kv.column([request], req_kv.ROW)[0] < 0:
        return 0
    return max(0, req_kv.column([request], req_kv.ALLOCATED)[0])
