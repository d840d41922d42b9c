"""Lets a worker step wait before it runs, like a call into the driver that is slow or hangs.

The wait is one C call without the GIL. No signal ends it, so a Python signal handler does not run
meanwhile: a main thread that is stuck in CUDA looks like that. If the wait is shorter than
``G4DEBUG_HANG_SECONDS``, no tracer may report anything. If it is longer, SIGTERM must leave a dump.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from g4debug.faults.base import Fault, Injection


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def stall(milliseconds: int) -> None:
    """Wait in C without the GIL. No signal ends ``pthread_mutex_timedlock``."""
    mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER, unlocked
    libc = ctypes.CDLL(None)
    until = time.time_ns() + milliseconds * 1_000_000
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_Timespec(*divmod(until, 1_000_000_000))))


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = batch.forward_mode.name.lower() if batch.forward_mode else ""
        action = injection.fire(mode=mode)
        if action is not None:
            wait = injection.fault.number_of(action)
            injection.log(f"{mode}: {wait} ms")
            stall(wait)


FAULT = Fault(
    id="delayed-step",
    title="a worker step waits before it runs",
    tasks={"on": "wait as many milliseconds as the argument says"},
    caught_by=(),
    arguments=("on",),
    counts="milliseconds",
    default=100,
    selectors=("mode",),
)
