"""Lets a worker step wait before it runs, like a call into the driver that is slow or hangs.

The wait is one C call without the GIL. No signal ends it, so a Python signal handler does not run
meanwhile: a main thread that is stuck in CUDA looks like that. If the wait is shorter than
``G4DEBUG_HANG_SECONDS``, no tracer may report anything. If it is longer, that is a hang
(``docs/tracers.md`` says when it is told). With a compiler it is none, however long it takes.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
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


def compile_for(milliseconds: int) -> None:
    """Wait in the same way, while a process of ours runs that is called like CUDA's compiler."""
    work = "open('/proc/self/comm', 'w').write('nvcc'); print(1, flush=True); input()"
    compiler = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", work],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with compiler:  # which closes its stdin, so that it ends
        assert compiler.stdout is not None
        compiler.stdout.readline()
        stall(milliseconds)


def install(injection: Injection) -> None:
    @injection.before("scheduler.run_batch")
    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = batch.forward_mode.name.lower() if batch.forward_mode else ""
        action = injection.fire(mode=mode)
        if action is not None:
            wait = injection.fault.number_of(action)
            injection.log(f"{mode}: {wait} ms")
            (compile_for if action.task == "compiles" else stall)(wait)


FAULT = Fault(
    id="delayed-step",
    title="a worker step waits before it runs",
    tasks={
        "on": "wait as many milliseconds as the argument says",
        "compiles": "the same, and a compiler that it has started runs meanwhile",
    },
    caught_by=(),
    arguments=("on", "compiles"),
    counts="milliseconds",
    default=100,
    selectors=("mode",),
)
