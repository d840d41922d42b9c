"""An engine that a test watches while it runs: its log, its scheduler, its dumps."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import drive_tracers
import psutil
from real_engine import TERMINAL, Process, dumps_in, started

from g4debug.findings.record import TrapRecord

DRIVER = Path(drive_tracers.__file__)
HANG = 2  # G4DEBUG_HANG_SECONDS
LIMIT = 300  # seconds; an engine alone takes about 12


@dataclass
class Run:
    process: Process
    log: Path
    folder: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def dumps(self) -> list[TrapRecord]:
        return dumps_in(self.folder)

    def wait_for(self, text: str, count: int = 1) -> None:
        deadline = time.monotonic() + LIMIT
        while self.text.count(text) < count:
            assert self.process.poll() is None, self.text[-3000:]
            assert time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.2)

    def scheduler(self) -> psutil.Process:
        """Once it has its title, which it takes after it was started."""
        deadline = time.monotonic() + LIMIT
        while True:
            children = psutil.Process(self.process.pid).children(recursive=True)
            found = [c for c in children if "sglang::scheduler" in title(c)]
            if found:
                return found[0]
            assert time.monotonic() < deadline, self.text[-3000:]
            time.sleep(0.05)

    def terminate_scheduler(self) -> float:
        """SIGTERM by pid. Returns the seconds until it is gone."""
        scheduler = self.scheduler()
        begin = time.monotonic()
        scheduler.send_signal(signal.SIGTERM)
        psutil.wait_procs([scheduler], LIMIT)
        assert not scheduler.is_running() or scheduler.status() == psutil.STATUS_ZOMBIE
        return time.monotonic() - begin


def title(process: psutil.Process) -> str:
    """What a process is called; nothing, if it has ended, waited for or not."""
    with contextlib.suppress(psutil.NoSuchProcess):  # ZombieProcess is one
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def engine(
    folder: Path,
    *command: str,
    ignored: tuple[signal.Signals, ...] = TERMINAL,
    **environ: str,
) -> Iterator[Run]:
    environ = {
        "G4DEBUG_TRACE": "flight-recorder",
        "G4DEBUG_HANG_SECONDS": str(HANG),
        **environ,
    }
    what = command or (str(DRIVER),)
    with started(folder, *what, ignored=ignored, **environ) as (process, log):
        yield Run(process, log, folder)
