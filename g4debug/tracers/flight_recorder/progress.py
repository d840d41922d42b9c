"""Tells from two clocks if the scheduler hangs, without asking the device or the main thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from g4debug.findings.steps import Recorder


@dataclass(frozen=True)
class Hang:
    """seconds: for how long. stuck: the event loop stands still. Else it runs, but does no work."""

    seconds: float
    stuck: bool
    what: str  # for the headline


class Progress:
    """Keeps two times: when the event loop last made a round, and when a step was last not overdue.

    A scheduler hangs if

    * its event loop makes no round. An idle loop makes rounds all the time (at least one in a
      second if it sleeps), so it does not matter whether there is work; or
    * its event loop makes rounds while requests wait or run, but begins no step. A paused engine
      (``_engine_paused``) does not hang.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.round_at = time.monotonic()
        self.step_at = self.round_at
        self.inside = False  # a step has begun and has not returned

    def came_round(self, *args: Any, **kwargs: Any) -> None:
        """Called in each round of the event loop."""
        self.round_at = time.monotonic()
        if not any(self._work()):
            self.step_at = self.round_at  # there is no work, so no step is overdue

    def step_begins(self, *args: Any, **kwargs: Any) -> None:
        self.step_at = time.monotonic()
        self.inside = True

    def step_ends(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.step_at = time.monotonic()
        self.inside = False
        return result

    def _work(self) -> tuple[int, int]:
        """The number of requests that wait, and of those that run.

        A prompt that is computed in chunks is in neither list between two of its chunks.
        """
        scheduler = self.recorder.scheduler
        if getattr(scheduler, "_engine_paused", False):
            return 0, 0
        running = getattr(scheduler, "running_batch", None)
        chunked = getattr(scheduler, "chunked_req", None)
        requests = getattr(running, "reqs", ())
        apart = chunked is not None and all(r is not chunked for r in requests)
        return len(getattr(scheduler, "waiting_queue", ())), len(requests) + apart

    def hang(self, limit: float) -> Hang | None:
        """The hang, if there was no progress for ``limit`` seconds. Else None."""
        now = time.monotonic()
        if now - self.round_at >= limit:
            return Hang(now - self.round_at, True, self._stuck(now - self.round_at))
        waiting, running = self._work()
        if (waiting or running) and now - self.step_at >= limit:
            what = (
                f"the event loop runs, but has begun no step for {now - self.step_at:.0f} s "
                f"({waiting} requests waiting, {running} running)"
            )
            return Hang(now - self.step_at, False, what)
        return None

    def _stuck(self, seconds: float) -> str:
        step = self.recorder.current
        if step is None:
            return f"the event loop has been stuck for {seconds:.0f} s, before its first step"
        batch = f"step {step.step} ({step.forward_mode}, {len(step.rids)} requests)"
        if self.inside:
            return f"{batch} has not returned for {seconds:.0f} s"
        return f"the event loop has been stuck for {seconds:.0f} s, after {batch}"
