"""Tells of an event loop that stands: on SIGTERM, and by itself before somebody kills the server.

All of it runs in other threads than the loop. A loop that compiles kernels or loads weights stands,
too, so what the main thread is doing decides (:mod:`g4debug.tracers.flight_recorder.busy`): such
work is dumped and warned of, and is no finding.

By itself a hang is told after ``hang_seconds`` only where two things are known: that the loop waits
for the device (:mod:`g4debug.tracers.flight_recorder.device_wait`), and that this is far longer
than the steps of this size take (:mod:`g4debug.tracers.flight_recorder.pace`). Everywhere else it
is told later, shortly before SGLang's watchdog kills the server: a hang that is none is worse than
one that is told late.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from g4debug.hooking.resolved import dp_attention, server_argument
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import busy, report, work
from g4debug.tracers.flight_recorder.device_wait import DeviceWait
from g4debug.tracers.flight_recorder.progress import Hang, Progress
from g4debug.tracers.flight_recorder.sigterm import bounded

# SGLang's own watchdog kills a hung server by SIGKILL. The dump must be there by then.
WATCHDOG_SHARE = 0.8
ALONE = 300.0  # seconds; after these it is told where no watchdog does so
LOOK = 3.0  # seconds; a loop that stands for so long is asked each second what it does
# A step of one of several ranks may wait for another one.
SIZES = ("tp_size", "dp_size", "pp_size", "nnodes")


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
        self._wait = DeviceWait()
        self._late = (-1, 0)  # the last round that was looked at, and the late ticks before it

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
        places = report.main_thread() if seconds >= LOOK else []
        self._say_busy(bool(places) and bool(busy.doing(places)))
        waited = self._waited(places)
        least = self.context.settings.hang_seconds
        if seconds < least or self._told == self.progress.rounds:
            return  # no limit is lower, and which one it is need not be asked each second
        limit, why = self._limit()
        if seconds < limit and self._is_too_long(waited):
            limit = least
            why = f"dumped because it has waited for the device in this place for {waited:.0f} s"
        if seconds >= limit:
            hang = self.progress.hang(limit)
            if hang is not None and hang.stuck:
                bounded(lambda: self._tell(hang, why))

    def _waited(self, places: list[str]) -> float:
        """For how long the main thread is known to have done nothing but wait for the device.

        0 from the moment on in which the process may have been suspended, until the next round:
        what the device did meanwhile is not known.
        """
        rounds, late = self.progress.rounds, self.progress.clock.late
        if self._late[0] != rounds:
            self._late = (rounds, late)
        if self._busy or late != self._late[1]:
            self._wait.forget()
            return 0.0
        return self._wait.seconds(rounds, places, self.progress.stuck())

    def _is_too_long(self, waited: float) -> bool:
        """True if this wait is no work that takes so long on a healthy server, as far as is known.

        Never where a step can wait for another rank, or for something else than its own device:
        for another server, for host memory or for storage.
        """
        usual = self.progress.pace.limit()
        if usual is None or waited < max(self.context.settings.hang_seconds, usual):
            return False
        if self.progress.inside and not self.progress.returned:
            return False
        scheduler = self.context.recorder.scheduler
        args = getattr(scheduler, "server_args", None)
        alone = all(server_argument(args, name, 1) == 1 for name in SIZES)
        return alone and next(work.limits(scheduler), None) is None

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
