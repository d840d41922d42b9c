"""Leaves a dump where a scheduler dies or hangs without a finding, from host memory alone.

Three cases: a CUDA error, any other exception that nobody caught, and SIGTERM to a scheduler
that hangs. What the dump holds was kept in ``findings/steps.py`` while all was well: after a
sticky CUDA error nothing can be read from the device, and a hung scheduler may sit inside the
driver. This tracer checks nothing. It never raises: the exception goes on as it was, and the
signal kills as it would have.

With this tracer alone a dump has the last steps; the allocators' events need a tracer that
keeps the page ledger.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from g4debug.hooking.hooks import Order
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.flight_recorder import report as finding
from g4debug.tracers.flight_recorder.progress import Hang, Progress
from g4debug.tracers.flight_recorder.sigterm import SigtermWatch
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import TrapError

LOOP = "scheduler.run_event_loop"
# SGLang's own watchdog ends a hung server by SIGKILL; the dump must be there by then.
WATCHDOG_SHARE = 0.8
logger = logging.getLogger("g4debug")


class FlightRecorder:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.recorder = context.recorder
        self.progress = Progress(context.recorder)
        self.watch = SigtermWatch(self.on_sigterm, self.on_tick)
        self.complete = finding.all_tracers_armed(context.settings)
        self.warned = False  # dumped ahead of SGLang's watchdog, once

    def install(self) -> None:
        context, progress = self.context, self.progress
        context.after("scheduler.init", self.after_scheduler_init)
        context.before("scheduler.recv_requests", progress.came_round)
        context.before("scheduler.run_batch", progress.step_begins)
        context.after("scheduler.run_batch", progress.step_ends)
        context.before(LOOP, self.before_event_loop)
        context.after(LOOP, self.after_event_loop)
        # Last: a tracer that reports instead of the exception makes a TrapError of it.
        context.on_exception("scheduler.init", self.on_init_exception, Order.LAST)
        context.on_exception(LOOP, self.on_loop_exception, Order.LAST)

    def after_scheduler_init(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        describer = self.context.trap.describe
        if isinstance(describer, Describer):
            describer.remember_machine()
        return result

    def before_event_loop(self, *args: Any, **kwargs: Any) -> None:
        self.progress.came_round()
        self.watch.start()

    def after_event_loop(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.watch.stop()
        return result

    def on_init_exception(self) -> None:
        self._on_exception("scheduler.init")

    def on_loop_exception(self) -> None:
        self._on_exception(LOOP)
        self.watch.stop()

    def _on_exception(self, site: str) -> None:
        error = sys.exception()
        if error is None or _reported(error):
            return
        found = finding.of_exception(error, site, self.context, self.complete)
        self.context.trap.report_end(found)

    def on_sigterm(self) -> None:
        """In the watcher's thread: a dump if the scheduler hangs. The signal then kills."""
        hang = self.progress.hang(self.context.settings.hang_seconds)
        if hang is not None:
            self._report(hang, "looked at because of SIGTERM")

    def on_tick(self) -> None:
        """In the watcher's thread: a dump shortly before SGLang's watchdog kills."""
        args = getattr(self.recorder.scheduler, "server_args", None)
        timeout = getattr(args, "watchdog_timeout", None)
        if self.warned or not isinstance(timeout, (int, float)) or timeout <= 0:
            return
        hang = self.progress.hang(max(self.context.settings.hang_seconds, WATCHDOG_SHARE * timeout))
        if hang is not None and hang.stuck:
            self.warned = True
            self._report(hang, f"SGLang's watchdog ends the server at {timeout:.0f} s")

    def _report(self, hang: Hang, why: str) -> None:
        self.context.trap.report_end(finding.of_hang(hang, why, self.context, self.complete))


def _reported(error: BaseException) -> bool:
    """True if a tracer's finding is behind this exception: it has a dump of its own."""
    return any(isinstance(e, TrapError) for e in finding.chain(error))


def install(context: Context) -> None:
    FlightRecorder(context).install()


TRACER = Tracer(
    id="flight-recorder",
    title="a scheduler that dies or hangs without a finding leaves its last steps",
    sites=("scheduler.init", "scheduler.recv_requests", "scheduler.run_batch", LOOP),
    install=install,
)
