"""Makes a running scheduler write its tape, for ``g4debug doctor --pid PID --tape FILE``."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from g4debug.cli import CliError, program, report
from g4debug.cli._running import LATE, is_stopped, look
from g4debug.dumps import reading, writing
from g4debug.dumps.heads import quoted
from g4debug.findings.status_file import ASKED_BYTES, StatusFileError, ask, read, withdraw
from g4debug.reporters.running import STOPPED


def fetch(pid: int, target: Path) -> str:
    """Move the dump of the scheduler below the process ``pid`` to ``target``. Says what it has."""
    schedulers = look(pid).schedulers
    if not schedulers:
        raise CliError(f"no scheduler at or below process {pid} shows a status")
    first = schedulers[0]
    others = [p for p in schedulers if p.rank != first.rank and "dp 0" not in p.rank]
    if others:
        pids = ", ".join(f"{p.pid} ({p.rank})" for p in schedulers)
        raise CliError(f"these schedulers decide for themselves: {pids}; say which by --pid")
    path = dump_of(first.pid)
    try:
        tape = reading.read(path).tape
        if tape is None:
            why = f"scheduler {first.pid} has no tape (G4DEBUG_TAPE=0, or another limit)"
            raise CliError(f"{why}, so {target} was not written")
        report.refuse_odd(target, path)
        # Only its owner may read it, as any dump; yesterday's stays until this one is whole.
        writing.write(path.read_bytes(), target.absolute().parent, target.name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    said = f"{target}: {tape.steps} steps and {tape.requests} requests of scheduler {first.pid}\n"
    if tape.limits:
        said += f"It cannot be replayed: a tape cannot carry this ({'; '.join(tape.limits)}).\n"
    elif not tape.steps:
        before = f" after what no tape carries ({'; '.join(tape.ended)})" if tape.ended else ""
        said += f"There is nothing to replay yet: it has just begun{before}.\n"
    return f"{said}next: {program()} show {quoted(target)}"


def dump_of(pid: int) -> Path:
    """Ask for a dump, and wait until it is there."""
    question = secrets.token_bytes(ASKED_BYTES)
    try:
        before = ask(pid, question)
        end = time.monotonic() + LATE
        while time.monotonic() < end:
            told = read(pid) or {}
            if told.get("asked") == question.hex():
                if told.get("no_dump") or not told.get("dump"):
                    raise CliError(f"scheduler {pid} wrote no dump: {told.get('no_dump')}")
                # As that process sees it: it may be in a container.
                return Path(f"/proc/{pid}/root{told['dump']}")
            time.sleep(0.05)
        withdraw(pid, question, before)
    except StatusFileError as e:
        raise CliError(f"scheduler {pid}: {e}") from e
    why = STOPPED if is_stopped(pid) else "its event loop is stuck"
    raise CliError(f"scheduler {pid} did not answer within {LATE:.0f} s: {why}")
