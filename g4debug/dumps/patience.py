"""Work on a disk that may hang, for which a server waits only so long.

A network file system that has lost its server answers no call, without an end and without an
error. Who waits for it does so in the kernel, where neither Python nor a signal handler runs. So
the work is done by a thread of its own, which may stay there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from g4debug.dumps.errors import DumpError

SECONDS = 20.0  # well under the 300 s after which SGLang's watchdog kills a scheduler
T = TypeVar("T")
logger = logging.getLogger("g4debug")


class HungDiskError(DumpError):
    """A disk has not answered in time."""


class _Work(threading.Thread):
    def __init__(self, folder: Path, work: Callable[[], object]) -> None:
        super().__init__(name="g4debug-disk", daemon=True)
        self.folder, self.work = folder, work
        self.given_up = False
        self.result: object = None
        self.error: Exception | None = None

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.result = self.work()
        except Exception as e:
            self.error = e
        if self.given_up:
            took = time.monotonic() - began
            outcome = self.error or self.result or "it is done"
            logger.warning(
                "g4debug: the disk of %s has answered after %.0f s: %s", self.folder, took, outcome
            )


_hanging: dict[Path, _Work] = {}  # per folder, the work that somebody gave up


def within(folder: Path, work: Callable[[], T], seconds: float | None = None) -> T:
    """The result of ``work``, which uses the disk of ``folder``. What it raises is raised.

    seconds: SECONDS if it is not given. Raises HungDiskError if it takes longer. The work is then
    not undone: it may still come to its end, which is logged. Until then, more work in that folder
    is refused at once, so that each finding of a server that goes on does not cost the same
    seconds.
    """
    folder = Path(os.path.abspath(folder))
    earlier = _hanging.get(folder)
    if earlier is not None and earlier.is_alive():
        raise HungDiskError(f"the disk of {folder} still has not answered an earlier call")
    _hanging.pop(folder, None)
    thread = _Work(folder, work)
    try:
        thread.start()
    except RuntimeError:  # Python starts no thread any more while the process ends
        return work()
    seconds = SECONDS if seconds is None else seconds
    thread.join(seconds)
    if thread.is_alive():
        _hanging[folder] = thread
        thread.given_up = True
        raise HungDiskError(f"the disk of {folder} has not answered in {seconds:.0f} s")
    if thread.error is not None:
        raise thread.error
    return thread.result  # type: ignore[return-value]
