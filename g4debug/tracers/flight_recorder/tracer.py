"""flight-recorder: when a scheduler dies or hangs without a finding, it saves the last steps.

It checks nothing. It writes a dump when the scheduler dies of a CUDA error or of any other
exception that nobody caught, when the scheduler gets SIGTERM while it hangs, and when it has stood
for so long that SGLang's own watchdog soon kills it, or should have. If the scheduler dies and the
other tracers found nothing, the dump says what they had checked by then
(:mod:`g4debug.tracers.flight_recorder.coverage`).

The dump is made from host memory alone: from what ``findings/steps.py`` has recorded while all was
well. After a CUDA error nothing can be read from the device, and a scheduler that hangs may be
stuck in the driver. If the process is killed, another one makes it from the black box
(:mod:`g4debug.tracers.flight_recorder.boxing`). This tracer never raises. The exception goes on as
it was, and the signal kills as it would have. If it is armed alone, the dump has no events of the
allocators, because those need a tracer that uses the page ledger.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from g4debug.backends import phases
from g4debug.findings.launch_memory import Seat
from g4debug.findings.record import DeviceAssert, Evidence, Lookup
from g4debug.hooking.hooks import Order
from g4debug.hooking.resolved import server_argument
from g4debug.tracers.base import Context, Tracer
from g4debug.tracers.flight_recorder import (
    core_autopsy,
    coredump,
    device_asserts,
    embedding_lookups,
    lookups,
    work,
)
from g4debug.tracers.flight_recorder import report as finding
from g4debug.tracers.flight_recorder.assert_evidence import Asserted
from g4debug.tracers.flight_recorder.boxing import Boxing
from g4debug.tracers.flight_recorder.completed_steps import Waited
from g4debug.tracers.flight_recorder.coverage import Death, innocence
from g4debug.tracers.flight_recorder.memory import MemoryWatch
from g4debug.tracers.flight_recorder.progress import Progress
from g4debug.tracers.flight_recorder.request_events import RequestEvents
from g4debug.tracers.flight_recorder.running_clock import TICK
from g4debug.tracers.flight_recorder.sigterm import SigtermWatch
from g4debug.tracers.flight_recorder.standing import Standing
from g4debug.tracers.flight_recorder.stderr_capture import Printed
from g4debug.tracers.flight_recorder.stuck import Stuck
from g4debug.tracers.flight_recorder.taping import Taping
from g4debug.tracers.flight_recorder.ticks import Ticks
from g4debug.tracers.flight_recorder.with_core import REMOVED
from g4debug.trapping.describe import Describer
from g4debug.trapping.trap import TrapError

LOOP = "scheduler.run_event_loop"


class FlightRecorder:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.recorder = context.recorder
        self.progress = Progress(context.recorder)
        self.standing = Standing(context, self.progress)
        self.waited = Waited(context.recorder)
        self.boxing = Boxing(context, self.waited, lambda: finding.earlier(context))
        self.printed = Printed()
        self.seen = embedding_lookups.Seen()
        self.armed_at = time.time()
        self.watch = SigtermWatch(self.on_sigterm, self.on_limit, self.boxing.asked)
        self.complete = finding.all_tracers_armed(context.settings)
        self.stuck = Stuck(
            context,
            self.progress,
            self.complete,
            stands=lambda: self.standing.stands,
            not_asked=lambda: self.boxing.asked(False),
        )
        self.ticks = Ticks(self.stuck.tick, TICK)
        self.others = context.trap.others
        self.telling = threading.Lock()  # of the main thread and of the one that waits for others
        self.told = False  # True once a dump was written because another rank has stopped

    def install(self) -> None:
        context, progress = self.context, self.progress
        context.after("scheduler.init", self.after_scheduler_init)
        context.before("scheduler.recv_requests", progress.came_round)
        context.before("scheduler.recv_requests", self.look)
        context.recorder.status.waits = self.standing.live
        context.before("runner.init", self.seen.runner)
        memory = MemoryWatch(context, self.seen, self.boxing.tell)
        memory.install()
        self.boxing.look = memory.look
        context.before("scheduler.run_batch", progress.step_begins)
        context.before("scheduler.run_batch", self.seen.batch)
        context.after("scheduler.run_batch", progress.step_ends)
        context.after("scheduler.run_batch", self.waited.launched)
        context.after("scheduler.process_result", self.waited.processed)
        context.before(LOOP, self.before_event_loop)
        context.after(LOOP, self.after_event_loop)
        context.before("scheduler.init", self.watch_others)
        context.recorder.status.snapshot = self.snapshot
        # Order.LAST, to see if a tracer has made a TrapError of the exception.
        if context.settings.tape:
            taping = Taping(context)
            taping.install()
            describer = context.trap.describe
            if isinstance(describer, Describer):
                describer.tape = taping.tape
            self.boxing.requests = RequestEvents(context)  # they tell as much as a tape
            self.boxing.requests.install()
        context.on_exception("scheduler.init", self.on_init_exception, Order.LAST)
        context.on_exception(LOOP, self.on_loop_exception, Order.LAST)
        self.boxing.install()  # last, so that it is outermost

    def look(self, *args: Any, **kwargs: Any) -> None:
        """In each round of the event loop: does the server stand?"""
        self.standing.look()

    def snapshot(self) -> Callable[[], tuple[str, str]]:
        """Copy what a dump of a scheduler that runs has. Returns what writes it, for a thread:
        it returns the dump's path, and why there is none.
        """
        write = self.context.trap.keep(finding.of_asking(self.context))

        def rest() -> tuple[str, str]:
            path, problem = write()
            return "" if path is None else str(path.absolute()), problem

        return rest

    def after_scheduler_init(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        describer = self.context.trap.describe
        if isinstance(describer, Describer):
            describer.remember()
        self.boxing.tell()
        if torch.cuda.is_available():
            self._tell_core_dumps()
        for what, why in work.limits(self.recorder.scheduler):
            self.context.limit(what, why)
        return result

    def _tell_core_dumps(self) -> None:
        """Say at start what a CUDA error will not leave."""
        settings = self.context.settings
        if coredump.ends_the_process(os.environ):
            self.context.limit(
                "a CUDA error leaves no exception, and only the dump of the black box",
                coredump.abort_words(os.environ),
            )
        elif settings.core != "off" and coredump.ENABLE not in os.environ:
            forced = settings.core == "force"
            why = coredump.why_not(settings.debug_dir, forced) or (
                f"{coredump.taken(os.environ)} was set before"
            )
            self.context.limit("a CUDA error leaves no CUDA core dump", why)
        elif coredump.is_ours(os.environ) and (old := coredump.too_old()):
            self.context.limit(
                "whether a CUDA error leaves an exception, and a CUDA core dump, is not known",
                f"{old}; G4DEBUG_CORE=force has switched them on",
            )

    def watch_others(self, *args: Any, **kwargs: Any) -> None:
        coredump.prepare(os.environ, self.context.settings.debug_dir)
        self.others.watch(self.on_other_rank)

    def before_event_loop(self, *args: Any, **kwargs: Any) -> None:
        self.progress.came_round()
        try:
            self.ticks.start()
        except RuntimeError as e:
            self.context.limit("a loop that stands is not told", f"no thread can be started: {e}")
        self.watch.start()

    def after_event_loop(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        self.ticks.stop()
        self.watch.stop()
        return result

    def on_init_exception(self) -> None:
        describer = self.context.trap.describe
        if isinstance(describer, Describer):
            describer.name_launch()
        self._on_exception("scheduler.init")

    def on_loop_exception(self) -> None:
        self.ticks.stop()
        self._on_exception(LOOP)
        self.watch.stop()

    def _on_exception(self, site: str) -> None:
        error, began = sys.exception(), time.monotonic()
        if error is None or _reported(error):
            return
        first = self.others.first()
        if first is not None:
            self._tell_other_rank(first, error, began)
            return
        self.others.ending = True
        asserted = self._asserted(error)
        found = finding.of_exception(
            error, site, self.context, self.complete, self._innocence, asserted
        )
        trap = self.context.trap
        if asserted is not None:
            evidence = asserted.evidence
        elif finding.is_cuda(error) and coredump.is_enabled(os.environ):
            # A driver that writes a core dump was seen to call a failed assertion "unspecified
            # launch failure" and "illegal memory access". If the core dump says that it was an
            # assertion, the lookups are what is asked next.
            evidence = dataclasses.replace(self._of_cuda(error), lookups=self._lookups(()))
        else:
            evidence = self._of_cuda(error)
        path = trap.report_end(found, evidence)
        trap.stop(found, path)
        self._look_into_core(error, path, began)

    def on_other_rank(self, first: Seat) -> None:
        """Another rank has stopped: save what this one has. Runs in a thread that waits for it."""
        self._tell_other_rank(first, None, time.monotonic())

    def _tell_other_rank(self, first: Seat, error: BaseException | None, began: float) -> None:
        """Write the dump of a rank that found nothing, once. error: what it then died of."""
        with self.telling:
            if self.told:
                return
            self.told = self.others.ending = True
            found = finding.of_other_rank(first, error, self.context)
            trap = self.context.trap
            path = trap.report_end(found, self._of_cuda(error))
            trap.stop(found, path)
            self._look_into_core(error, path, began)

    def _of_cuda(self, error: BaseException | None) -> Evidence:
        """What the autopsy of a core dump asks: who holds which page, by the ledger."""
        if error is None or not finding.is_cuda(error) or self.context.ledger is None:
            return Evidence()
        requests = dict.fromkeys(rid for step in self.recorder.steps[-2:] for rid in step.rids)
        try:
            from g4debug.ledger import held  # a server without the ledger loads nothing of it

            return Evidence(held=held.of_requests(self.context.ledger, requests))
        except Exception as e:
            self.context.limit(
                "the dump does not tell who held which page", f"{type(e).__name__}: {e}"
            )
            return Evidence()

    def _look_into_core(self, error: BaseException | None, path: Path | None, began: float) -> None:
        """Put what the CUDA core dump says into the dump of a CUDA error, which came at began."""
        settings = self.context.settings
        if error is None or path is None or settings.core == "off" or not finding.is_cuda(error):
            return
        if not coredump.is_enabled(os.environ):
            return
        core_autopsy.put_into(
            path,
            os.environ,
            os.getpid(),
            self.armed_at,
            wait=not settings.cpu,
            remove=self._removes_core(),
            began=began,
        )

    def _asserted(self, error: BaseException) -> Asserted | None:
        """The evidence about an assertion in a kernel, None if the device died of something else.

        cuBLAS, NCCL and a driver that writes a core dump say only that the device failed. Then an
        assertion is believed if no other rank can have printed it.
        """
        alone = not self._other_ranks()
        if finding.is_assert(error):
            found = device_asserts.parse(self.printed.wait_for(device_asserts.any_in))
        elif not (alone and finding.is_vague(error)) or not (
            found := device_asserts.parse(self.printed.text())
        ):
            return None
        why = self.printed.why or "the file that stderr goes to has no such line"
        return Asserted(found, self._lookups(found), "" if found else why, shared=not alone)

    def _lookups(self, found: Sequence[DeviceAssert]) -> tuple[Lookup, ...]:
        """The lookups of the last steps, judged by the assertions that were printed, if any."""
        host = embedding_lookups.Host(
            self.recorder.scheduler,
            self.seen,
            self.recorder.steps,
            self.waited.last,
            self.recorder.rank,
        )
        return lookups.judge(embedding_lookups.lookups(host), found)

    def _other_ranks(self) -> bool:
        args = getattr(self.recorder.scheduler, "server_args", None)
        sizes = (server_argument(args, name, 1) for name in ("tp_size", "dp_size", "pp_size"))
        return any(isinstance(size, int) and size > 1 for size in sizes)

    def _innocence(self, cuda: bool) -> list[str]:
        """The checks that passed before the scheduler died, and those not made, in sentences."""
        describer = self.context.trap.describe
        if isinstance(describer, Describer):
            describer.look()  # so that no tracer vouches for what its hooks do not see any more
        status = self.recorder.status
        death = Death(
            step=self.recorder.step,
            finished=self.waited.last,
            replays=self.waited.replays,
            cuda=cuda,
            backends=phases.asked(getattr(self.recorder.scheduler, "server_args", None)),
        )
        lines = innocence(death, status.records())
        return [*(lines or [finding.NOT_KNOWN]), *(self._core_dump() if cuda else [])]

    def _core_dump(self) -> list[str]:
        """Where the CUDA core dump is, in a sentence."""
        core = coredump.core_dump(os.environ, os.getpid(), self.armed_at)
        ours = coredump.is_ours(os.environ)
        if not core or (ours and self.context.settings.cpu):
            return []  # the CPU engine has no driver
        return [core + REMOVED if ours and self._removes_core() else core]

    def _removes_core(self) -> bool:
        """True if a core dump of ours goes. With --crash-dump-folder the user has asked for it."""
        args = getattr(self.recorder.scheduler, "server_args", None)
        asked = server_argument(args, "crash_dump_folder")
        return self.context.settings.removes_cores and not asked

    def on_sigterm(self, number: int = signal.SIGTERM) -> None:
        """Write a dump if the scheduler hangs. Runs in the watcher's thread, which then kills."""
        self.stuck.sigterm(number)

    def on_limit(self, why: str) -> None:
        """Note that SIGTERM cannot be watched in this process."""
        self.context.limit(
            "SIGTERM leaves no dump of a hang", f"SIGTERM cannot be watched here: {why}"
        )


def _reported(error: BaseException) -> bool:
    """True if this exception comes from a tracer's finding, which has a dump of its own."""
    return any(isinstance(e, TrapError) for e in finding.chain(error))


TRACER = Tracer(
    id="flight-recorder",
    title="checks nothing; saves the last steps when the scheduler dies or hangs without a finding",
    install=lambda context: FlightRecorder(context).install(),
    judges=False,
)
