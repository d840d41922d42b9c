"""Tells from clocks if the scheduler hangs, without asking the device or the main thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from g4debug.findings.steps import Recorder
from g4debug.tracers.flight_recorder import work
from g4debug.tracers.flight_recorder.pace import Pace
from g4debug.tracers.flight_recorder.running_clock import RunningClock
from g4debug.tracers.flight_recorder.work import Place

ROUND = 1.0  # seconds; an idle loop may sleep for so long in a round


@dataclass(frozen=True)
class Hang:
    """seconds: for how long. stuck: the event loop stands still. Else it runs, but does no work.

    first: it is within the first step of this process, in which kernels are compiled and loaded.
    """

    seconds: float
    stuck: bool
    what: str  # for the headline
    first: bool = False


class Progress:
    """Keeps for how long the event loop has made no round, and when a step was last not overdue.

    A scheduler hangs if

    * its event loop makes no round. An idle loop makes rounds all the time (at least one in a
      second if it sleeps), so it does not matter whether there is work; or
    * its event loop makes rounds while it has work (:mod:`work`), but begins no step.

    A step is a batch of requests. The empty batch that a rank runs beside others (DP attention) is
    none: a rank that serves nobody runs them, too.

    ``loop`` is the time in which the loop turned: of a round that took longer than ``ROUND``, only
    so much counts. So a process that was stopped, or that loaded weights, has not waited meanwhile.
    ``clock`` is the time in which the process ran: a round is not long because of ``docker pause``.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.clock, self.pace = RunningClock(), Pace()
        self.rounds = 0
        self.round_at = time.monotonic()
        self.round_ran = self.clock.seconds(self.round_at)  # ``clock`` when this round began
        self.loop = 0.0
        self.step_loop = 0.0  # ``loop`` when a step was last not overdue
        self.inside = False  # a step has begun and has not returned
        self.returned = False  # a step of requests has, ever
        self.empty = 0  # batches of no request, which a rank runs because others have some
        self._is_empty = False
        self._looked = self.round_at
        self._forwards: Any = None

    def came_round(self, *args: Any, **kwargs: Any) -> None:
        """Called in each round of the event loop."""
        now = time.monotonic()
        self.loop += min(now - self.round_at, ROUND)
        self.pace.came_round(now - self.round_at)
        self.rounds += 1
        self.round_at, self.round_ran = now, self.clock.seconds(now)
        if now - self._looked < ROUND:
            return
        self._looked = now
        # SGLang's own count of batches, for a step that our hook has not seen.
        forwards = getattr(self.recorder.scheduler, "forward_ct", None)
        if isinstance(forwards, int):
            forwards -= self.empty
        if forwards != self._forwards or not any(self.due()):
            self._forwards = forwards
            self._made()

    def step_begins(
        self, scheduler: Any = None, batch: Any = None, *args: Any, **more: Any
    ) -> None:
        mode = getattr(batch, "forward_mode", None)
        self._is_empty = mode is not None and mode.is_idle()
        self.empty += self._is_empty
        if not self._is_empty:
            self._made()
            self.pace.begins(batch)
        self.inside = True

    def step_ends(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_empty:
            self._made()
            self.returned = True
        self.inside = False
        return result

    def _made(self) -> None:
        self.step_loop = self.loop

    def due(self) -> tuple[int, int]:
        """How many requests wait for a step, and how many of them have begun.

        Those that wait for something outside of the scheduler are not counted. Memory that a
        transfer of disaggregation holds is outside, too: the other server ends it, or SGLang does.
        Those that wait for memory before their own transfer are counted only if there is no other
        transfer and nothing is kept elsewhere: a transfer may hold memory of the host, which is
        not seen here.
        """
        items = work.of(self.recorder.scheduler)
        found = [w.place for w in items if not w.place.outside]
        peers = [w.request for w in items if w.place is Place.PEER]
        if any(work.holds_memory(request) for request in peers):
            found = [place for place in found if place is Place.RUNS]
        if peers or work.frees_without_steps(self.recorder.scheduler):
            found = [place for place in found if place is not Place.ROOM]
        begun = sum(place in (Place.RUNS, Place.CHUNK) for place in found)
        return len(found) - begun, begun

    def hang(self, limit: float) -> Hang | None:
        """The hang, if there was no progress for ``limit`` seconds. Else None."""
        seconds = self.stuck()
        if seconds >= limit:
            first = self.inside and not self.returned
            return Hang(seconds, True, self._stuck(seconds), first)
        seconds = self.loop - self.step_loop
        if seconds >= limit and any(self.due()):
            return self.turning(seconds)
        return None

    def stuck(self) -> float:
        """For how many seconds the process has run since the event loop's last round."""
        return self.clock.seconds(time.monotonic()) - self.round_ran

    def turning(self, seconds: float) -> Hang:
        """The hang of a loop that turns and has begun no step for so long."""
        waiting, begun = self.due()
        what = (
            f"the event loop runs, but has begun no step for {seconds:.0f} s "
            f"({waiting} requests waiting, {begun} begun)"
        )
        return Hang(seconds, False, what)

    def _stuck(self, seconds: float) -> str:
        step = self.recorder.current
        if step is None:
            return f"the event loop has been stuck for {seconds:.0f} s, before its first step"
        batch = f"step {step.step} ({step.forward_mode}, {len(step.rids)} requests)"
        if self.inside:
            return f"{batch} has not returned for {seconds:.0f} s"
        return f"the event loop has been stuck for {seconds:.0f} s, after {batch}"
