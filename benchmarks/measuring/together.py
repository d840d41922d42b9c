"""Servers that are all on the device from the beginning, of which one at a time is awake.

Starting a server takes a minute, and two servers alike can differ by more than a tracer's cost.
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
    """Servers that were begun, and are to start together.

    first: one more, which starts alone, compiles what all of them need, and is gone before they
    start. It is compared with none: a server that has the machine for itself when it starts stays
    faster than one that is like it.
    """

    def __init__(self, first: Gated, servers: Sequence[Gated]) -> None:
        self.first: Gated | None = first
        self.servers = list(servers)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_first()
        for server in self.servers:
            signal_all(server, signal.SIGCONT)
        for server in self.servers:
            server.stop()

    def start(self, prepare: Any) -> str:
        """Start them, ask each ``prepare(server)``, and put all to sleep. Returns the device.

        One that dies is left out of ``servers`` from then on, and its end is printed: the others
        are compared without it. Raises ServerDied if it was the first.
        """
        assert self.first is not None
        device = str(self.first.start()["device"])
        prepare(self.first)
        self._stop_first()

        def lives(server: Gated) -> bool:
            try:
                server.start()
                prepare(server)
            except ServerDied as e:
                print(e, flush=True)
                return False
            return True

        begun = list(self.servers)
        with ThreadPoolExecutor(max(1, len(begun))) as pool:
            alive = list(pool.map(lives, begun))
        for server, lived in zip(begun, alive, strict=True):
            if not lived:
                server.stop()
                self.servers.remove(server)
        for server in self.servers:
            signal_all(server, signal.SIGSTOP)
        return device

    def _stop_first(self) -> None:
        if self.first is not None:
            first, self.first = self.first, None
            first.stop()

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
