"""A limit on what a command may take for a file that may be of anybody."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from g4debug.cli import CliError


@contextlib.contextmanager
def bounded(refusal: str, seconds: int, room: int) -> Iterator[None]:
    """With a limit on processor time and memory of this process, where the system has such limits.

    refusal: the error's text if the time is over. seconds: of processor time from now on. room:
    bytes of memory beside what this process has. Raises CliError, and MemoryError.
    """

    def refuse(*args: object) -> NoReturn:
        raise CliError(refusal)

    usage, before = resource.getrusage(resource.RUSAGE_SELF), {}
    limits = {resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + seconds}
    with contextlib.suppress(OSError):  # no /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + room
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGXCPU, refuse) if main else None
    try:
        for what, limit in limits.items():
            soft, hard = resource.getrlimit(what)
            # A limit that somebody else has set, and that is lower, stays.
            if all(other == resource.RLIM_INFINITY or other > limit for other in (soft, hard)):
                with contextlib.suppress(OSError, ValueError):
                    resource.setrlimit(what, (limit, hard))
                    before[what] = soft, hard
        yield
    finally:
        for what, old in before.items():
            resource.setrlimit(what, old)
        if main:
            signal.signal(signal.SIGXCPU, handler)
