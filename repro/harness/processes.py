"""Runs children, each in a process group of its own that never outlives this script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4debug import cpu
from harness.warm import warm as warm_processes

CHILD = Path(__file__).with_name("child.py")
UP = "g4debug-repro: engine up"
ILLEGAL = "an illegal memory access was encountered"
STAND_INS = f'  File "{cpu.SITE.parent}/'  # how a traceback names the files of the CPU engine
_SWITCH = re.compile(
    r"^(G4DEBUG_|SGLANG_TRTLLM_MHA_DEBUG|SGLANG_GEMMA4_|SGLANG_ENABLE_PIECEWISE_CUDA_GRAPH_FOR_MM)"
)
_SWA_USAGE = re.compile(r"swa token usage: ([0-9.]+)")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE = 10.0  # seconds
START = 900.0  # seconds in which an engine must be up, also on a machine that is busy with others
LIFELINE = "REPRO_LIFELINE"  # the variable in which a child finds the pipe's number
_asked: list[int] = []  # signals that asked this script to end


class Stopped(BaseException):
    """A signal asked this script to end. ``status``: 128 and its number, as a shell says it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def listen() -> None:
    """Let a signal end this script within a second, and with it all that it started.

    A signal that was ignored when the script was started stays ignored: Ctrl-C is not meant for
    a job in the background, nor the end of the terminal for one under nohup. The handler raises
    nothing, because an exception between the start of a child and the note of it would lose the
    child.
    """
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _asked.append(number))


def go_on() -> None:
    """Raises Stopped once a signal has asked for the end."""
    if _asked:
        raise Stopped(_asked[0])


def script(main: Callable[[], int]) -> int:
    """The exit status of ``main``, or of the signal that ended it."""
    listen()
    try:
        return main()
    except Stopped as stopped:
        print("stopped; no process of ours is left", file=sys.stderr)
        return stopped.status


def end_with_the_script() -> None:
    """For a child: when the script that started it is gone, even by SIGKILL, so is its group."""
    line = os.environ.pop(LIFELINE, None)
    if line is not None:
        threading.Thread(target=_hold, args=(int(line),), daemon=True).start()


def _hold(line: int) -> None:
    os.read(line, 1)  # nobody writes: it returns when the script's end of the pipe is closed
    os.killpg(0, signal.SIGKILL)


@dataclass
class Outcome:
    """The result of one child. status is None if it was stopped because it took too long."""

    variant: str
    status: int | None
    seconds: float
    log: Path
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def completed(self) -> bool:
        return self.status == 0 and bool(self.result)

    @property
    def illegal_access(self) -> bool:
        return ILLEGAL in self.text

    @property
    def swa_peak(self) -> float:
        """Highest share of the SWA pool in use that SGLang logged, 0..1."""
        return max((float(m) for m in _SWA_USAGE.findall(self.text)), default=0.0)

    def traceback(self, lines: int = 14) -> list[str]:
        """The last lines of the scheduler's traceback, as a user sees it in the log."""
        text = self.text
        start = text.rfind("Scheduler hit an exception")
        if start < 0:
            start = text.rfind("Traceback (most recent call last)")
        if start < 0:
            return []
        found: list[str] = []
        for line in text[start:].splitlines():
            if found and (line.startswith("[20") or line.startswith("Fatal Python")):
                break
            found.append(line)
        while found and not found[-1].strip():
            found.pop()
        found = _without_stand_ins(found)
        return found if len(found) <= lines else [found[0], "  …", *found[-lines + 2 :]]


def _without_stand_ins(lines: Sequence[str]) -> list[str]:
    """A traceback without the frames of the CPU engine's stand-ins: a GPU has none of them there.

    A frame is its line with the file and the deeper lines that follow.
    """
    kept: list[str] = []
    inside = False
    for line in lines:
        if line.startswith("  File "):
            inside = line.startswith(STAND_INS)
        elif not line.startswith("    "):
            inside = False
        if not inside:
            kept.append(line)
    return kept


def child(
    module: str, device: str, result: Path, arguments: Mapping[str, Any], *python: str
) -> list[str]:
    """The command line of a child; see ``child.py``. python: starts it, if not this Python."""
    start = python or (sys.executable,)
    return [*start, str(CHILD), module, device, str(result), json.dumps(dict(arguments))]


def without_switches() -> dict[str, str]:
    """Our environment for a child: the switches of whoever called the script must not leak in."""
    return {k: v for k, v in os.environ.items() if not _SWITCH.match(k)}


def run_child(
    name: str,
    module: str,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    folder: Path,
    timeout: float,
    *,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda text: None,
    last_words: str = "",
    python: Sequence[str] = (),
    start: float = 0.0,
    warm: bool = False,
    stands: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run a child with ``environment`` on top of ours; wait at most ``timeout`` seconds.

    It leaves ``name.log`` and its result, ``name.json``, in ``folder``. start: if given, the child
    has so many seconds until its engine is up, and ``timeout`` from then on. last_words: once this
    is in the log, the child has ``GRACE`` seconds to end. A scheduler that dies while it is idle
    may leave SGLang's main process waiting for it for ever. warm: on the CPU engine, it is forked
    from a process that has SGLang's imports behind it. stands: asked twice a second; once it is
    True, the child is known to hang, and counts as one that took too long. Raises Stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = child(module, device, result, arguments, *python)
    log = folder / f"{name}.log"
    base = without_switches()
    if device == "cpu":
        base = cpu.environment(base)
    begin = time.monotonic()
    phase, end, status = "starting", begin + (start or timeout), None
    begun = warm_group if warm else group
    with log.open("wb") as sink, begun(command, {**base, **environment}, sink) as process:
        while status is None and time.monotonic() < end and not stands():
            go_on()
            if phase == "starting" or last_words:  # else nothing is looked for, and logs are long
                text = log.read_text(errors="replace")
                if UP in text and phase == "starting":
                    phase = "generating"
                    end = time.monotonic() + timeout if start else end
                if last_words and last_words in text:
                    end = min(end, time.monotonic() + GRACE)
            progress(f"{phase}, {time.monotonic() - begin:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=0.5)
    text = result.read_text() if result.is_file() else ""
    data = json.loads(text) if text else {}  # one that failed may have begun the file
    return Outcome(name, status, time.monotonic() - begin, log, data)


@contextmanager
def warm_group(
    command: list[str], environment: Mapping[str, str], sink: Any
) -> Iterator[warm_processes.Process]:
    """The same of :mod:`harness.warm.warm`. The group ends with this script, even by SIGKILL."""
    go_on()
    process = warm_processes.start(tuple(command[1:]), environment, sink.fileno())
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(GRACE)


@contextmanager
def group(
    command: list[str], environment: Mapping[str, str], sink: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own. Whatever happens, the whole group is gone afterwards."""
    go_on()
    line, ours = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            env={**environment, LIFELINE: str(line)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[line],
        )
        try:
            yield process
        finally:
            # SGLang's children stay in the group of their parent, also after it died.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        os.close(line)
        os.close(ours)
