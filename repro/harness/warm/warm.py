"""Processes on the CPU engine that are spared SGLang's import, some 4 s of a core for each.

An engine is three processes, which import the same before they do anything else. ``start`` has
them forked from one that did so (warm_server.py): one for each process that asks, such as pytest,
started when it is first wanted. That it makes no difference: tests/cpu/test_engine.py, which runs
one engine from cold beside a warm one and compares what both have imported when SGLang loads its
plugins.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path

from g4debug import cpu

SERVER = Path(__file__).with_name("warm_server.py")
SECONDS = 300  # that the import may take; alone it takes 4
SPARES = 3  # the schedulers of two ranks and a detokenizer; a fourth process is started as ever
SIGNALS = """
import os, signal, sys
ignored = set(map(int, sys.argv[1].split()))
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[2], sys.argv[2:])
"""
_first = threading.Lock()


def signals(*ignored: signal.Signals) -> list[str]:
    """The beginning of a command line: these signals are ignored, all others at their defaults.

    Without it a child ignores what pytest was started to ignore: nothing from a terminal, Ctrl-C
    and more under nohup, in CI and in the background.
    """
    return [sys.executable, "-ISc", SIGNALS, " ".join(str(int(n)) for n in ignored)]


class WarmError(RuntimeError):
    """The server of warm processes does not work; the text has its last words."""


class Process:
    """Of ``subprocess.Popen``: pid, poll, wait, returncode. Its parent is the server."""

    def __init__(self, report: int, server: Server) -> None:
        self._report, self._server = report, server
        self._lines = b""
        self.returncode: int | None = None
        self.pid = self._number(SECONDS, 1)

    def _number(self, seconds: float, line: int) -> int:
        """A line of the pipe. Raises TimeoutError, or WarmError if it will never come."""
        end = time.monotonic() + seconds
        while self._lines.count(b"\n") < line:
            ready, _, _ = select.select([self._report], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self._report, 64)
            if not part:
                raise WarmError(f"no word of a process any more: {self._server.words()}")
            self._lines += part
        return int(self._lines.splitlines()[line - 1])

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit status, a signal's number negative. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            try:
                self.returncode = self._number(timeout, 2)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
            os.close(self._report)
        return self.returncode


class Server:
    def __init__(self) -> None:
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.NamedTemporaryFile(prefix="g4debug-warm-")  # noqa: SIM115
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
        self._process = subprocess.Popen(
            [*signals(), sys.executable, "-m", "g4debug.cpu", str(SERVER), str(its.fileno())],
            env=clean,
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for pytest, which then closes the socket
        )
        its.close()
        self._control.settimeout(SECONDS)
        if self._control.recv(16) != b"ready":
            raise WarmError(f"it did not start: {self.words()}")

    def words(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-3000:]

    def start(
        self,
        command: tuple[str, ...],
        environ: Mapping[str, str],
        log: int,
        fds: Mapping[int, int],
        spares: int,
    ) -> Process:
        order = {
            "argv": command, "environ": cpu.environment(environ), "folder": os.getcwd(),
            "fds": [*fds], "spares": spares,
        }  # fmt: skip
        report, its = os.pipe()
        try:
            message = json.dumps(order).encode()
            socket.send_fds(self._control, [message], [log, its, *fds.values()])
        finally:
            os.close(its)
        return Process(report, self)


@functools.cache
def _server() -> Server:
    return Server()


def start(
    command: tuple[str, ...],
    environ: Mapping[str, str],
    log: int,
    fds: Mapping[int, int] = types.MappingProxyType({}),
    spares: int = SPARES,
) -> Process:
    """``command``: a Python script and its arguments; all that it prints goes to ``log``.

    fds: descriptors of ours that it gets, by the number that each has there: 0 for its standard
    input, or one that is far from those in use, such as 1100. spares: how many of the processes
    that it starts by ``multiprocessing`` are forked, too.
    """
    with _first:
        server = _server()
    return server.start(command, environ, log, fds, spares)
