"""Servers that are measured one after the other, alone on the device, and begun in advance."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from served import gate

from g4debug.cpu.server import free_port
from measuring.servers import Server, ServerDied, Variant

PATIENCE = 300  # seconds for any one thing that a server does


class Gated(Server):
    """A server. Its scheduler waits in ``served/gate.py`` until :meth:`start`."""

    def __init__(self, name: str, variant: Variant, device: str, folder: Path) -> None:
        self.gate = folder / name
        os.mkfifo(f"{self.gate}.pipe")
        environment = {**variant.environment, gate.VARIABLE: str(self.gate)}
        engine = {**variant.engine, "nccl_port": free_port()}
        mine = replace(variant, environment=environment, engine=engine)
        super().__init__(name, mine, device, folder)

    def wait_at_gate(self) -> None:
        """Return when the scheduler has imported everything."""
        self._wait_for(Path(f"{self.gate}.ready"))

    def start(self) -> dict[str, Any]:
        """Let the scheduler go on; returns the server's message when it is up."""
        self.wait_at_gate()
        Path(f"{self.gate}.pipe").write_text("go")
        return self.read()

    def facts(self) -> dict[str, Any]:
        """The scheduler's facts about itself; see ``gate.facts``."""
        path = Path(f"{self.gate}.facts")
        path.unlink(missing_ok=True)
        os.kill(int(Path(f"{self.gate}.ready").read_text()), signal.SIGUSR2)
        self._wait_for(path)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def switch(self) -> None:
        """Switch the tracers off, or on again; see ``gate.py``. Only while it serves nothing."""
        path = Path(f"{self.gate}.switched")
        path.unlink(missing_ok=True)
        os.kill(int(Path(f"{self.gate}.ready").read_text()), signal.SIGUSR1)
        self._wait_for(path)

    def stop(self) -> None:
        """Kill the processes, and return when the last has left the device."""
        try:
            mine = psutil.Process(self.process.pid)
            family = [mine, *mine.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        self.up = True  # one that still waits at its gate is no surprise
        super().stop()
        until = time.monotonic() + PATIENCE
        while any(_holds_something(p) for p in family):
            if time.monotonic() > until:
                raise ServerDied(f"processes of the {self.name} server do not end: {family}")
            time.sleep(0.05)

    def _wait_for(self, path: Path) -> None:
        until = time.monotonic() + PATIENCE
        while not path.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise ServerDied(f"the {self.name} server wrote no {path.name}:\n{self.tail()}")
            time.sleep(0.05)


def _holds_something(process: psutil.Process) -> bool:
    """True until the kernel has taken everything from the process, GPU memory among it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Fleet:
    """The servers of ``names``, (name, variant), in this order. Each is stopped before the next.

    ahead: how many are begun in advance. They wait without touching the device.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, str]],
        variants: Mapping[str, Variant],
        device: str,
        folder: Path,
        ahead: int,
    ) -> None:
        self._rest = iter(names)
        self._variants, self._device, self._folder = variants, device, folder
        self._begun: deque[Gated] = deque()
        self._ahead = ahead

    def __enter__(self) -> Fleet:
        for _ in range(self._ahead + 1):
            self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._begun:
            server.stop()

    def __iter__(self) -> Iterator[Gated]:
        while self._begun:
            yield self._begun[0]
            self._begun[0].stop()
            self._begun.popleft()
            self._begin()

    def quiet(self) -> None:
        """Return when no server is importing any more, which would disturb the one that runs."""
        for server in list(self._begun)[1:]:
            server.wait_at_gate()

    def _begin(self) -> None:
        if (following := next(self._rest, None)) is not None:
            name, variant = following
            self._begun.append(Gated(name, self._variants[variant], self._device, self._folder))
