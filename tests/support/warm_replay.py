"""The processes of replays, forked from one that has SGLang's imports behind it (warm.py)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import warm

from g4debug.findings.decisive import DECISIVE
from g4debug.replay import host

RUN_MODULE = Path(__file__).with_name("run_module.py")
ANSWERS = 1100  # the number of that pipe in the process
SECONDS = 60.0  # that a process may take to be gone once it was killed


class Process:
    """Of ``subprocess.Popen``, what ``g4debug replay`` asks of it."""

    def __init__(self, process: warm.Process, stdin: BinaryIO) -> None:
        self.pid, self.stdin, self._process = process.pid, stdin, process

    def wait(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        return self._process.wait(SECONDS)


@contextlib.contextmanager
def warm_replays() -> Iterator[list[int]]:
    """Replays of this release start so. Yields the numbers of the processes that did.

    SGLang reads some variables when it is imported, which a warm process has done: a replay that
    has one starts from cold, and so does one of another release.
    """
    cold, forked = host.begun, []

    def begun(
        interpreter: str, order: Path, environ: dict[str, str], log: int, answers: int
    ) -> object:
        if interpreter != sys.executable or not DECISIVE.isdisjoint(environ):
            return cold(interpreter, order, environ, log, answers)
        command = (str(RUN_MODULE), "g4debug.replay.child", str(order), str(ANSWERS))
        its, ours = os.pipe()
        try:
            fds = {0: its, ANSWERS: answers}
            process = warm.start(command, environ, log, fds=fds, spares=0)
        finally:
            os.close(its)
        forked.append(process.pid)
        return Process(process, os.fdopen(ours, "wb"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "begun", begun)
        yield forked
