"""A server of the toy models on the CPU engine, which runs while a test talks to it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from g4debug.cpu import environment
from g4debug.cpu.server import command, free_port, wait_until_healthy


@contextmanager
def serving(
    user_flags: Sequence[str] = (),
    *,
    log: Path,
    timeout: float = 90.0,
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a server in a process group of its own. Yields its URL when it answers /health."""
    port = free_port()
    line = command([*user_flags, "--host", "127.0.0.1", "--port", str(port)])
    base = {**os.environ, **(extra_environment or {})}
    with log.open("wb") as sink:
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
        yield url
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
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
