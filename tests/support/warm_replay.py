"""The processes of replays and of their scripts, forked from a warm one (warm.py)."""

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
from g4debug.replay import host, script

RUN_MODULE = Path(__file__).with_name("run_module.py")
ANSWERS = 1100  # the number of that pipe in the process
SECONDS = 60.0  # that a process may take to be gone once it was killed


class Process:
    """Of ``subprocess.Popen``, what ``g4debug replay`` asks of it."""

    def __init__(self, process: warm.Process, stdin: BinaryIO | None = None) -> None:
        self.pid, self.stdin, self._process = process.pid, stdin, process

    def wait(self, timeout: float = SECONDS) -> int:
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        return self._process.wait(timeout)


def may_be_warm(interpreter: str, environ: dict[str, str]) -> bool:
    return interpreter == sys.executable and DECISIVE.isdisjoint(environ)


@contextlib.contextmanager
def warm_replays() -> Iterator[None]:
    """Replays of this release, and the scripts that they write, start so.

    SGLang reads some variables when it is imported, which a warm process has done: a replay that
    has one starts from cold, and so does one of another release.
    """
    cold, cold_script = host.begun, script.begun

    def begun(
        interpreter: str, order: Path, environ: dict[str, str], log: int, answers: int
    ) -> object:
        if not may_be_warm(interpreter, environ):
            return cold(interpreter, order, environ, log, answers)
        command = (str(RUN_MODULE), "g4debug.replay.child", str(order), str(ANSWERS))
        its, ours = os.pipe()
        try:
            fds = {0: its, ANSWERS: answers}
            process = warm.start(command, environ, log, fds=fds, spares=0)
        finally:
            os.close(its)
        return Process(process, os.fdopen(ours, "wb"))

    def begun_script(command: list[str], environ: dict[str, str], log: int) -> object:
        if not may_be_warm(command[0], environ):
            return cold_script(command, environ, log)
        return Process(warm.start(tuple(command[1:]), environ, log))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "begun", begun)
        patch.setattr(script, "begun", begun_script)
        yield
