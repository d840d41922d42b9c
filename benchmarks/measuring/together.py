"""Servers that are all on the device from the beginning, of which one at a time is awake.

Starting a server takes a minute, and two servers alike can differ by more than what is measured.
So here each is started once and asked in many short turns. Between its turns all its processes
are stopped by SIGSTOP: it then uses neither the host nor the device, but for its memory.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil

from measuring.fleet import Gated
from measuring.servers import ServerDied


class Crowd:
    """Servers that were begun, in the order in which they are to start.

    The first starts alone, because it compiles what all of them need; then all others together.
    """

    def __init__(self, servers: Sequence[Gated]) -> None:
        self.servers = list(servers)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self.servers:
            signal_all(server, signal.SIGCONT)
        for server in self.servers:
            server.stop()

    def start(self, prepare: Any) -> str:
        """Start them, ask each ``prepare(server)``, and put all to sleep. Returns the device.

        One that dies is left out of ``servers`` from then on, and its end is printed: the others
        are compared without it. Raises ServerDied if it was the first.
        """
        first, *others = self.servers
        device = str(first.start()["device"])
        prepare(first)

        def lives(server: Gated) -> bool:
            try:
                server.start()
                prepare(server)
            except ServerDied as e:
                print(e, flush=True)
                return False
            return True

        with ThreadPoolExecutor(max(1, len(others))) as pool:
            alive = list(pool.map(lives, others))
        for server, lived in zip(others, alive, strict=True):
            if not lived:
                server.stop()
                self.servers.remove(server)
        for server in self.servers:
            signal_all(server, signal.SIGSTOP)
        return device

    @contextmanager
    def awake(self, server: Gated) -> Iterator[Gated]:
        """This server, and no other, runs meanwhile."""
        signal_all(server, signal.SIGCONT)
        try:
            yield server
        finally:
            signal_all(server, signal.SIGSTOP)


def signal_all(server: Gated, number: int) -> None:
    """Send a signal to all processes of a server; to none, if it has ended."""
    try:
        mine = psutil.Process(server.process.pid)
        for process in [mine, *mine.children(recursive=True)]:
            process.send_signal(number)
    except psutil.NoSuchProcess:
        return
