"""Is the scheduler hung? Decided from two clocks, without asking the device or the main thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from g4debug.findings.steps import Recorder


@dataclass(frozen=True)
class Hang:
    """seconds: since when. stuck: the main thread is in one place; else its loop spins idly."""

    seconds: float
    stuck: bool
    what: str  # for the headline


class Progress:
    """Two clocks: when the event loop last came round, and when a step was last not overdue.

    Hung is a scheduler

    * whose event loop does not come round. An idle loop comes round all the time (at least once
      a second where it sleeps), so this needs no look at the work; or
    * whose loop comes round with requests waiting or running, and begins no step. A paused
      engine (``_engine_paused``) is not hung.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.round_at = time.monotonic()
        self.step_at = self.round_at
        self.inside = False  # a step began and did not come back

    def came_round(self, *args: Any, **kwargs: Any) -> None:
        self.round_at = time.monotonic()
        if not any(self._work()):
            self.step_at = self.round_at  # no step is owed

    def step_begins(self, *args: Any, **kwargs: Any) -> None:
        self.step_at = time.monotonic()
        self.inside = True

    def step_ends(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.step_at = time.monotonic()
        self.inside = False
        return result

    def _work(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        scheduler = self.recorder.scheduler
        if getattr(scheduler, "_engine_paused", False):
            return 0, 0
        running = getattr(scheduler, "running_batch", None)
        return len(getattr(scheduler, "waiting_queue", ())), len(getattr(running, "reqs", ()))

    def hang(self, limit: float) -> Hang | None:
        """The hang, if there was no progress for ``limit`` seconds."""
        now = time.monotonic()
        if now - self.round_at >= limit:
            return Hang(now - self.round_at, True, self._stuck(now - self.round_at))
        waiting, running = self._work()
        if (waiting or running) and now - self.step_at >= limit:
            what = (
                f"the event loop comes round, but no step began for {now - self.step_at:.0f} s "
                f"({waiting} requests wait, {running} run)"
            )
            return Hang(now - self.step_at, False, what)
        return None

    def _stuck(self, seconds: float) -> str:
        step = self.recorder.current
        if step is None:
            return f"the event loop is stuck for {seconds:.0f} s, before its first step"
        batch = f"step {step.step} ({step.forward_mode}, {len(step.rids)} requests)"
        if self.inside:
            return f"{batch} has not come back for {seconds:.0f} s"
        return f"the event loop is stuck for {seconds:.0f} s, after {batch}"
