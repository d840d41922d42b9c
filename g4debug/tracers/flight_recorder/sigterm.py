"""Sees SIGTERM although the main thread is stuck in a CUDA call, and lets it kill as before.

Python runs a signal handler in the main thread only, which in a hung scheduler may never come
back. But the C part of it writes a byte to ``signal.set_wakeup_fd`` at once, in whatever thread
the kernel picked, and a thread of ours waits for that byte. It needs the GIL, which calls into
CUDA, NCCL and the operating system give up. A main thread that hangs *with* the GIL cannot be
looked at; that it still dies is up to :func:`_die_without_python`.

What SIGTERM would have done is done after: by default the process dies of that very signal,
within milliseconds if the scheduler is healthy; a handler that was there is called.
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
from types import FrameType
from typing import Any

TICK = 5.0  # seconds between looks at the clock
LIMIT = 20.0  # seconds that a dump may take before the process dies without it
ALARM = signal.SIGIO  # its number, 29, is also seconds: see _die_without_python
logger = logging.getLogger("g4debug")


class SigtermWatch:
    """``on_sigterm`` runs in a thread of its own, for LIMIT seconds at most; ``on_tick`` likewise,
    every TICK seconds."""

    def __init__(self, on_sigterm: Callable[[], None], on_tick: Callable[[], None]) -> None:
        self.on_sigterm = on_sigterm
        self.on_tick = on_tick
        self.previous: Any = signal.SIG_DFL
        self._thread: threading.Thread | None = None
        self._read = self._write = self._other_fd = -1
        self._looked = threading.Event()
        self._mask: set[Any] = set()  # of the forking thread

    def start(self) -> None:
        """Call it in the main thread; elsewhere, or beside C code that handles SIGTERM, it only
        says that hangs will leave no dump."""
        previous = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or previous is None:
            logger.warning(
                "g4debug: flight-recorder: SIGTERM cannot be watched in this process (%s); a hang "
                "will leave no dump",
                "somebody's C code handles it" if previous is None else "not in the main thread",
            )
            return
        self.previous = previous
        if previous is signal.SIG_IGN:
            return  # nobody who wants the process to end would send it
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(
            target=self._watch, args=(self._read,), name="g4debug-sigterm", daemon=True
        )
        self._thread.start()
        _die_without_python(self._read)
        self._other_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._in_main_thread)
        os.register_at_fork(
            before=self._hold, after_in_parent=self._let_go, after_in_child=self._in_child
        )

    def stop(self) -> None:
        """Put back what was there. Main thread."""
        if self._write < 0:
            return
        # Before the pipe is closed: that, too, would send ALARM, whose default is to kill.
        flags = fcntl.fcntl(self._read, fcntl.F_GETFL)
        fcntl.fcntl(self._read, fcntl.F_SETFL, flags & ~os.O_ASYNC)
        _c_handler(ALARM, None)
        self._forget()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(1)

    def _hold(self) -> None:
        """A child shares our pipe: a SIGTERM of its own must wait until it has let go of it."""
        if self._write >= 0:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        if self._write >= 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _in_child(self) -> None:
        if self._write < 0:
            return
        try:
            self._forget()
            os.close(self._read)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _forget(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._in_main_thread:
            signal.signal(signal.SIGTERM, self.previous)
        signal.set_wakeup_fd(self._other_fd)
        os.close(self._write)  # ends the thread: it reads the end of the pipe
        self._write = -1

    def _in_main_thread(self, number: int, frame: FrameType | None) -> None:
        """The thread dumps and kills; what was there before us is called when it has looked."""
        if self._thread is not None and self._thread.is_alive():
            self._looked.wait(LIMIT + 1)
        if callable(self.previous):
            self.previous(number, frame)
        else:
            die()

    def _watch(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            if not poll.poll(TICK * 1000):
                self._bounded(self.on_tick)
                continue
            data = os.read(fd, 4096)
            if not data:
                os.close(fd)
                return
            if self._other_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._other_fd, data)
            if signal.SIGTERM in data:
                self._bounded(self.on_sigterm)
                self._looked.set()
                if not callable(self.previous):
                    die()
            signal.alarm(0)  # this thread runs, so Python does

    def _bounded(self, work: Callable[[], None]) -> None:
        """Whatever hangs the scheduler may hang us, too: a lock, a full disk, a blocked log."""

        def isolated() -> None:
            try:
                work()
            except Exception:
                logger.exception("g4debug: flight-recorder failed; please report this")

        thread = threading.Thread(target=isolated, name="g4debug-last-dump", daemon=True)
        thread.start()
        thread.join(LIMIT)


def die() -> None:
    """End this process by SIGTERM's default, from any thread: Python's way needs the main one."""
    _c_handler(signal.SIGTERM, None)  # SIG_DFL is the null pointer
    os.kill(os.getpid(), signal.SIGTERM)


def _die_without_python(fd: int) -> None:
    """Let the byte that arrives in the pipe ``fd`` also arm an alarm, without any Python.

    The kernel sends ALARM to the owner of a pipe with O_ASYNC. Its handler is libc's own
    ``alarm``, whose argument is then the number of that signal: SIGALRM, whose default is to
    kill, comes 29 seconds later, after LIMIT.
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
