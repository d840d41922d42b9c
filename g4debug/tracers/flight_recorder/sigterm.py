"""Notices SIGTERM although the main thread is stuck in a CUDA call. The process still dies of it.

Python runs a signal handler only in the main thread, which may be stuck for ever in a scheduler
that hangs. But the C part of the handler writes a byte to ``signal.set_wakeup_fd`` at once, in
whichever thread the operating system has chosen, and a thread of ours waits for that byte. This
thread needs the GIL, which is released by calls into CUDA, NCCL and the operating system. If the
main thread hangs *with* the GIL, nothing can be read from it, but :func:`_die_without_python` sees
to it that the process dies.

Afterwards SIGTERM does what it would have done without us. By default the process dies of it,
within milliseconds if the scheduler is healthy. If there was a handler before, it is called.

SIGHUP is watched in the same way: a terminal that is closed sends it to all that was started there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

LATER = 5.0  # seconds after a byte, in which its alarm has begun
LIMIT = 20.0  # seconds that a dump may take before the process dies without it
NUMBERS = (signal.SIGTERM, signal.SIGHUP)
ALARM = signal.SIGIO  # its number, 29, is also used as seconds, see _die_without_python
logger = logging.getLogger("g4debug")


class SigtermWatch:
    """Calls ``on_sigterm`` with the signal's number when one comes.

    The call runs in a thread of its own, and is waited for at most LIMIT seconds. ``at_once`` is
    called before, in the thread that waits: if the signal goes to the server's first process, too,
    the system kills this one as soon as that one has died.
    """

    def __init__(
        self,
        on_sigterm: Callable[[int], None],
        on_limit: Callable[[str], None],
        at_once: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_sigterm = on_sigterm
        self.on_limit = on_limit
        self.at_once = at_once
        self.previous: dict[int, Any] = {}  # of each signal that is watched: what handled it before
        self._thread: threading.Thread | None = None
        self._read = self._write = self._other_fd = -1
        self._looked = threading.Event()
        self._forks = threading.local()  # mask: the signal mask of a thread that forks

    def start(self) -> None:
        """Begin to watch. To be called in the main thread.

        In another thread, if C code handles SIGTERM, or if it is ignored, nothing is watched, and
        ``on_limit`` is called with the reason.
        """
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or previous is None:
            self.on_limit(
                "C code handles SIGTERM" if previous is None else "this is not the main thread"
            )
            return
        if previous is signal.SIG_IGN:
            self.on_limit("SIGTERM is ignored")
            return
        handlers = {number: signal.getsignal(number) for number in NUMBERS}
        # What is ignored stays ignored: nohup does so with SIGHUP.
        self.previous = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(
            target=self._watch, args=(self._read,), name="g4debug-sigterm", daemon=True
        )
        self._thread.start()
        _die_without_python(self._read)
        self._other_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self.previous:
            signal.signal(number, self._in_main_thread)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._let_go, after_in_child=self._in_child
        )

    def stop(self) -> None:
        """Restore what was there before. To be called in the main thread."""
        if self._write < 0:
            return
        # Before the pipe is closed: closing it would send ALARM, too, which kills by default.
        flags = fcntl.fcntl(self._read, fcntl.F_GETFL)
        fcntl.fcntl(self._read, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        _c_handler(ALARM, None)
        self._forget()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(1)

    def _hold(self) -> None:
        """Block them for a fork, so that none comes while the child still shares our pipe."""
        if self._write >= 0:
            self._forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.previous.keys())

    def _let_go(self) -> None:
        """Unblock them after a fork, in the thread that forked. Others may fork meanwhile."""
        mask = vars(self._forks).pop("mask", None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _in_child(self) -> None:
        """Give up the pipe in the child after a fork, and unblock them."""
        try:
            if self._write >= 0:
                self._forget()
                os.close(self._read)
        finally:
            self._let_go()

    def _forget(self) -> None:
        for number, handler in self.previous.items():
            if signal.getsignal(number) == self._in_main_thread:
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._other_fd)
        os.close(self._write)  # the thread reads the end of the pipe and ends
        self._write = -1

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """Python's handler. The thread dumps first; then call the earlier handler, or die."""
        if self._thread is not None and self._thread.is_alive():
            self._looked.wait(LIMIT + 1)
        previous = self.previous.get(number)
        if callable(previous):
            previous(number, frame)
        else:
            die(number)

    def _watch(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        came = False  # a byte, and it is not LATER yet
        while True:
            if not poll.poll(LATER * 1000 if came else None):
                # The byte wakes this thread a moment before it starts the alarm. So the alarm may
                # have begun after it was switched off below.
                signal.alarm(0)
                came = False
                continue
            data = os.read(fd, 4096)
            if not data:
                os.close(fd)
                return
            numbers = [number for number in self.previous if number in data]
            if numbers:
                self.at_once()
            if self._other_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._other_fd, data)
            for number in numbers:
                bounded(partial(self.on_sigterm, number))
                self._looked.set()
                if not callable(self.previous[number]):
                    die(number)
            signal.alarm(0)  # this thread runs, so _die_without_python is not needed
            came = True


def bounded(work: Callable[[], None]) -> None:
    """Do ``work``, but wait only LIMIT seconds: it may be blocked like the scheduler."""

    def isolated() -> None:
        try:
            work()
        except Exception:
            logger.exception("g4debug: flight-recorder failed. Please report this.")

    thread = threading.Thread(target=isolated, name="g4debug-last-dump", daemon=True)
    thread.start()
    thread.join(LIMIT)


def die(number: int) -> None:
    """End this process by a signal, from any thread. Python's own way needs the main thread."""
    _c_handler(number, None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), number)


def _die_without_python(fd: int) -> None:
    """Let the byte that arrives in the pipe ``fd`` also start an alarm, without any Python.

    With O_ASYNC the operating system sends the signal ALARM to the owner of the pipe. The handler
    of ALARM is libc's own function ``alarm``, which gets the number of the signal, 29, as its
    argument. So SIGALRM comes 29 seconds later, which is after LIMIT, and kills the process.
    """
    if sys.platform != "linux" or signal.getsignal(ALARM) is not signal.SIG_DFL:
        return
    _c_handler(ALARM, ctypes.cast(ctypes.CDLL(None).alarm, ctypes.c_void_p))
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, ALARM)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _c_handler(number: int, handler: Any) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, handler)
