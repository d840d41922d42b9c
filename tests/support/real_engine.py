"""Real SGLang in processes of their own, on the CPU engine: start, wait, read dumps and logs.

``ENGINE`` are the marks of a test that does so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warm

from g4debug.dumps import reading
from g4debug.findings import black_box
from g4debug.findings.record import TrapRecord

ENGINE = [
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    # Not importorskip: importing SGLang here is what the CPU engine's environment is for.
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]

Process = subprocess.Popen[bytes] | warm.Process

# What a job is started with: from a terminal, and under nohup, by CI or in the background.
TERMINAL: tuple[signal.Signals, ...] = ()
NOHUP = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


@dataclass
class Run:
    """status: exit status; log: all that was printed; dumps: oldest first."""

    status: int
    log: str
    dumps: list[TrapRecord]

    @property
    def results(self) -> list[Any]:
        """What the driver printed as ``RESULT <json>``, line by line."""
        lines = self.log.splitlines()
        return [json.loads(x.removeprefix("RESULT ")) for x in lines if x.startswith("RESULT ")]

    @property
    def result(self) -> Any:
        """The one that there must be."""
        assert len(self.results) == 1, self.log[-3000:]
        return self.results[0]


@contextlib.contextmanager
def started(
    folder: Path,
    *command: str,
    cold: bool = False,
    ignored: tuple[signal.Signals, ...] = TERMINAL,
    keep_boxes: bool = False,
    **environ: str,
) -> Iterator[tuple[Process, Path]]:
    """A process and its log; no switch of the caller is inherited, nothing of it is left over.

    ``command``: a Python script and its arguments. Its dumps go into ``folder / "dumps"``.
    ``cold``: it imports SGLang by itself, see :mod:`warm`. ``ignored``: see ``warm.signals``; a
    process that ignores some is a cold one. ``keep_boxes``: leave the black boxes of those that are
    killed here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    callers = ("G4DEBUG_", "SGLANG_", "PYTEST_")  # of pytest: which test happens to start it
    clean = {k: v for k, v in os.environ.items() if not k.startswith(callers)}
    environ = {**clean, "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(folder / "dumps"), **environ}
    with log.open("wb") as sink:
        if cold or ignored:
            process: Process = _cold(command, environ, sink.fileno(), ignored)
        else:
            process = warm.start(command, environ, sink.fileno())
        try:
            yield process, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
            for box in () if keep_boxes else boxes(folder):
                box.unlink(missing_ok=True)


def boxes(folder: Path) -> list[Path]:
    """The black boxes whose dumps would go to ``folder / "dumps"``."""
    found = []
    for path in black_box.paths():
        with black_box.opened(path) as box:
            if box is not None and box.owner.folder == str(folder / "dumps"):
                found.append(path)
    return found


def _cold(
    command: tuple[str, ...],
    environ: Mapping[str, str],
    log: int,
    ignored: tuple[signal.Signals, ...],
) -> Process:
    return subprocess.Popen(
        [*warm.signals(*ignored), sys.executable, "-m", "g4debug.cpu", *command],
        env=environ,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def drive(
    folder: Path,
    *command: str,
    seconds: float = 600,
    cold: bool = False,
    keep_boxes: bool = False,
    **environ: str,
) -> Run:
    """Run it to its end, which must come within ``seconds``."""
    how = {"cold": cold, "keep_boxes": keep_boxes}
    with started(folder, *command, **how, **environ) as (process, log):
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            text = log.read_text(errors="replace")
            pytest.fail(f"still running after {seconds} s:\n{text[-3000:]}")
    return Run(status, log.read_text(errors="replace"), dumps_in(folder))


def in_session(leader: int) -> list[str]:
    """The command lines of a session's living processes."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def dumps_in(folder: Path) -> list[TrapRecord]:
    """What ``drive`` and ``started`` left there, oldest first."""
    found = sorted((folder / "dumps").glob("*"), key=lambda p: p.stat().st_mtime_ns)
    return [reading.read(p) for p in found]


class WhenAsked(Mapping[str, Any]):
    """Runs by name. Each is made once, when a test asks for it; one that nobody asks for, never."""

    def __init__(self, **runs: Callable[[], Any]) -> None:
        self._runs = {name: functools.cache(_kept(run)) for name, run in runs.items()}

    def __getitem__(self, name: str) -> Any:
        found, error = self._runs[name]()
        if error is not None:
            raise error
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _kept(run: Callable[[], Any]) -> Callable[[], tuple[Any, BaseException | None]]:
    """What it returns, and what it raises in place of that: nobody waits for it twice."""

    def call() -> tuple[Any, BaseException | None]:
        try:
            return run(), None
        except (Exception, pytest.fail.Exception) as e:
            return None, e

    return call


def side_by_side(**runs: Callable[[], Any]) -> dict[str, Any]:
    """Runs that do not need each other, two at a time: one alone keeps one core busy."""
    with ThreadPoolExecutor(2) as pool:
        going = {name: pool.submit(run) for name, run in runs.items()}
    return {name: future.result() for name, future in going.items()}
