"""A server of the toy models on the CPU engine, which runs while a test talks to it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import warm

from g4debug.cpu import environment
from g4debug.cpu.server import command, free_port, wait_until_healthy
from g4debug.hooking import targets


@contextmanager
def serving(
    user_flags: Sequence[str] = (),
    *,
    log: Path,
    timeout: float = 90.0,
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a server in a process group of its own. Yields its URL when it answers /health."""
    with served(user_flags, log, timeout, extra_environment, warmed=False) as (url, _):
        yield url


@contextmanager
def served(
    user_flags: Sequence[str],
    log: Path,
    timeout: float,
    extra_environment: Mapping[str, str] | None = None,
    *,
    warmed: bool = True,
) -> Iterator[tuple[str, int]]:
    """The same: its URL, and the number of its first process. warmed: see :mod:`warm`."""
    port = free_port()
    line = command([*user_flags, "--host", "127.0.0.1", "--port", str(port)])
    base = {**os.environ, **(extra_environment or {})}
    process: subprocess.Popen[bytes] | warm.Process
    with log.open("wb") as sink:
        if warmed:
            assert line[1:3] == ["-m", "sglang.launch_server"]
            script = targets.sglang_root() / "sglang" / "launch_server.py"
            process = warm.start((str(script), *line[3:]), base, sink.fileno())
        else:
            process = subprocess.Popen(
                line,
                env=environment(base),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, process, log, timeout)
        yield url, process.pid
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes] | warm.Process, patience: float = 10.0) -> None:
    """Send SIGTERM to the server's process group, then SIGKILL to the processes that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
