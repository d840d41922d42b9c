"""Tells of an event loop that stands: on SIGTERM, and by itself before somebody kills the server.

All of it runs in other threads than the loop. A loop that compiles kernels or loads weights stands,
too, so what the main thread is doing decides (:mod:`g4debug.tracers.flight_recorder.busy`): such
work is dumped and warned of, and is no finding.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import busy, report
from g4debug.tracers.flight_recorder.progress import Hang, Progress
from g4debug.tracers.flight_recorder.sigterm import bounded

# SGLang's own watchdog kills a hung server by SIGKILL. The dump must be there by then.
WATCHDOG_SHARE = 0.8
ALONE = 300.0  # seconds; after these it is told where no watchdog does so
LOOK = 3.0  # seconds; a loop that stands for so long is asked what it does, for the other ranks


class Stuck:
    """stands: whether it was told already that the loop turns and serves nobody.

    complete: all tracers are armed. not_asked: called before a hang is told of a process that was
    asked to end: something was wrong with it.
    """

    def __init__(
        self,
        context: Context,
        progress: Progress,
        complete: bool,
        stands: Callable[[], bool],
        not_asked: Callable[[], None],
    ) -> None:
        self.context, self.progress, self.complete = context, progress, complete
        self.stands, self.not_asked = stands, not_asked
        self.others = context.trap.others
        self._told = -1  # the last round that was told
        self._busy = False  # that was said to the other ranks

    def sigterm(self, number: int) -> None:
        """The process was asked to end. Runs in the watcher's thread, which kills afterwards."""
        hang = self.progress.hang(self.context.settings.hang_seconds)
        if hang is None or (self.stands() and not hang.stuck):
            return
        if not hang.stuck or self._told != self.progress.rounds:
            self._tell(hang, f"dumped because of {signal.Signals(number).name}", self.not_asked)

    def tick(self) -> None:
        """Called once in a second, in a thread that does nothing else."""
        self.progress.clock.tick()
        seconds = self.progress.stuck()
        self._say_busy(seconds >= LOOK and bool(busy.doing(report.main_thread())))
        if seconds < self.context.settings.hang_seconds or self._told == self.progress.rounds:
            return  # no limit is lower, and which one it is need not be asked each second
        limit, why = self._limit()
        if seconds >= limit:
            hang = self.progress.hang(limit)
            if hang is not None and hang.stuck:
                bounded(lambda: self._tell(hang, why))

    def _limit(self) -> tuple[float, str]:
        """After how many seconds it is told, and why then."""
        least = float(self.context.settings.hang_seconds)
        alone = max(least, ALONE)
        scheduler: Any = self.context.recorder.scheduler
        timeout = server_argument(getattr(scheduler, "server_args", None), "watchdog_timeout")
        batch = getattr(scheduler, "cur_batch", True)
        # SGLang's watchdog looks only while there is a batch.
        watched = getattr(scheduler, "cur_batch_for_debug", batch) is not None
        if watched and isinstance(timeout, (int, float)) and timeout > 0:
            early = max(least, WATCHDOG_SHARE * timeout)
            if early <= alone:
                return early, f"dumped because SGLang's watchdog kills it after {timeout:.0f} s"
        return alone, f"dumped because it has stood for {alone:.0f} s, and no watchdog told it"

    def _tell(self, hang: Hang, why: str, before: Callable[[], None] = lambda: None) -> None:
        self._told = self.progress.rounds
        doing = self._doing(hang) if hang.stuck else ""
        if doing:
            self.context.trap.note_end(report.of_busy(hang, doing, why, self.context))
            return
        before()
        self.context.trap.report_end(report.of_hang(hang, why, self.context, self.complete))

    def _doing(self, hang: Hang) -> str:
        """What the loop stands for that is no hang, or may be none; '' if nothing is known."""
        doing = busy.doing(report.main_thread())
        if doing:
            return doing
        if hang.first:
            return "within its first step, in which kernels are compiled and loaded"
        args = getattr(self.context.recorder.scheduler, "server_args", None)
        other = self.others.busy(coupled=bool(dp_attention(args)))
        return f"maybe waiting for rank {other}, which is compiling or loading" if other else ""

    def _say_busy(self, now: bool) -> None:
        if now != self._busy:
            self._busy = now
            self.others.say_busy(now)
