"""Lets a worker step wait before it runs, as a slow or hung call into the driver does.

The wait is one C call that gives up the GIL and that no signal ends, so that a Python signal
handler does not run meanwhile: what a main thread stuck in CUDA looks like. Shorter than
``G4DEBUG_HANG_SECONDS`` it must stay silent; longer, SIGTERM must leave a dump.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from g4debug.faults.base import Fault, Injection
from g4debug.faults.grammar import Action, GrammarError

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

DEFAULT_MS = 100


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def milliseconds_of(action: Action) -> int:
    """How long an action waits. Raises GrammarError if its argument is no such number."""
    text = action.argument or str(DEFAULT_MS)
    if not text.isdecimal() or int(text) < 1:
        raise GrammarError(f"delayed-step: on({text}): expected milliseconds, from 1")
    return int(text)


def stall(milliseconds: int) -> None:
    """Wait in C, without the GIL. ``pthread_mutex_timedlock`` is not ended by a signal."""
    mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER, unlocked
    libc = ctypes.CDLL(None)
    until = time.time_ns() + milliseconds * 1_000_000
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_Timespec(*divmod(until, 1_000_000_000))))


def install(hooks: Hooks, injection: Injection) -> None:
    from g4debug.hooking.hooks import Order

    for action in injection.chain.actions:
        milliseconds_of(action)  # at start, not when it first fires

    def before_run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        mode = batch.forward_mode.name.lower() if batch.forward_mode else ""
        action = injection.fire(mode=mode)
        if action is not None:
            wait = milliseconds_of(action)
            injection.log(f"{mode}: {wait} ms")
            stall(wait)

    hooks.before("scheduler.run_batch", Order.FAULT, injection.fault.id, before_run_batch)


FAULT = Fault(
    id="delayed-step",
    title="a worker step waits before it runs",
    tasks={"on": "wait as many milliseconds as the argument says"},
    caught_by=(),
    install=install,
    arguments=("on",),
    selectors=("mode",),
)
