"""Puts the autopsy of a CUDA core dump into the dump of the process that crashed.

It is made in a process of its own, because the one that crashed has a dead CUDA context and may
hang, and because a core dump may hold anything: it gets so many seconds and no more. So does the
disk. If it cannot be made, dump and core dump stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from g4debug.dumps import patience
from g4debug.tracers.flight_recorder import coredump

LIMIT = 30.0  # seconds behind the error in which the log says what the core dump says, or why not
APPEARS = 8.0  # of them, in which a core dump must have begun
WRITTEN = 10.0  # and those that it may take to be written
STANDS = 0.5  # in which its size must not have changed: then it may be whole
SECONDS = 15.0  # that one reading of it may take
LEAST = 1.0  # for which it is worth to begin one
KILLED = 1.0  # that it may take to end once it was killed; one that waits for a disk does not
DISK = 5.0  # that its disk may take to answer, beside that, and when files are removed at the end
# What the autopsy says of a file of which a part is not written yet.
HALF = ("it is cut off", "it is empty", "it is not a 64-bit ELF file")
TOO_LONG = "it took more than"
OVER = "the time behind the error is over"
# -P: a folder "g4debug" where the server was started is not the package.
COMMAND = (sys.executable, "-P", "-m", "g4debug", "autopsy")
logger = logging.getLogger("g4debug")


def put_into(
    dump: Path,
    environ: Mapping[str, str],
    pid: int,
    since: float,
    *,
    wait: bool,
    remove: bool,
    began: float | None = None,
) -> None:
    """Find the core dump of the process, put its autopsy into ``dump``, and log what it says.

    since: as of :func:`coredump.find`. wait: the file may not be there yet. remove: remove it
    afterwards, if it is one that we let the driver write. began: the monotonic time of the error,
    now if it is not given: LIMIT seconds behind it all of this has been given up, but for removing.
    """
    end = (time.monotonic() if began is None else began) + LIMIT
    folder = coredump.folder(environ)
    try:
        core = _found(environ, pid, since, dump, APPEARS if wait else 0.0, end)
        if core is not None and _told(core, environ, dump, end) and remove:
            coredump.remove(environ, core, DISK)
    except coredump.LargeError as e:
        gone = coredump.remove(environ, e.path, DISK, grows=True)
        then = "; it was removed" if gone else "; it could not be removed"
        logger.error("g4debug: no autopsy of this crash: %s%s", e, then)
    except patience.HungDiskError as e:
        logger.error("g4debug: no autopsy of this crash: %s", e)
    coredump.prune(environ, folder)


def _found(
    environ: Mapping[str, str], pid: int, since: float, dump: Path, appears: float, end: float
) -> Path | None:
    """The core dump once it may be whole. Logs why there is none, if it was waited for.

    Raises HungDiskError and LargeError.
    """
    left = end - time.monotonic() - KILLED
    if left <= 0:
        _say_later(OVER, "CORE", dump)
        return None
    look = partial(_look, environ, pid, since, appears, end - KILLED)
    most = min(appears + WRITTEN + DISK, end - time.monotonic())
    core, late = patience.within(coredump.folder(environ), look, most)
    if core is None and late is not None:
        _say_later("the driver had not written all of it in time", late, dump)
    elif core is None and appears:
        logger.error(
            "g4debug: no CUDA core dump began to appear in %.0f s, so there is no autopsy of "
            "this crash. If one is there later, run: g4debug autopsy --write CORE %s",
            appears,
            dump,
        )
    return core


def _told(core: Path, environ: Mapping[str, str], dump: Path, end: float) -> bool:
    """Put the autopsy into the dump. True if there is one. Raises HungDiskError and LargeError."""
    again, half, found = time.monotonic() + WRITTEN, "", dict[str, Any]()
    while True:
        seconds = min(SECONDS, end - time.monotonic() - KILLED)
        if seconds < LEAST:
            problem = TOO_LONG
            break
        large = partial(coredump.refuse_large, environ, core)
        patience.within(coredump.folder(environ), large, min(DISK, seconds))
        found, problem = autopsy(core, dump, seconds)
        if not any(words in problem for words in HALF):
            break
        half = problem
        if time.monotonic() >= again:
            break
        # A disk that had stopped for a moment may go on: the size says only that it may be whole.
        time.sleep(STANDS)
    if half and (problem == half or problem.startswith(TOO_LONG)):
        _say_later(f"the driver had not written all of it in time ({half})", core, dump)
    elif problem.startswith(TOO_LONG):
        _say_later(OVER if problem == TOO_LONG else problem, core, dump)
    elif problem:
        logger.error("g4debug: no autopsy of %s: %s", core, problem)
    else:
        said = [str(found.get(name, "")) for name in ("verdict", "cause", "kernel", "exception")]
        logger.error("g4debug: the CUDA core dump says: %s", "; ".join(filter(None, said)))
    return not problem


def _say_later(why: str, core: Path | str, dump: Path) -> None:
    logger.error(
        "g4debug: no autopsy of %s: %s. Later, run: g4debug autopsy --write %s %s",
        core,
        why,
        core,
        dump,
    )


def _look(
    environ: Mapping[str, str], pid: int, since: float, appears: float, end: float
) -> tuple[Path | None, Path | None]:
    """The core dump if it is whole, and else the one that there is."""
    core = whole(environ, pid, since, appears, end)
    return core, coredump.find(environ, pid, since) if core is None else None


def whole(
    environ: Mapping[str, str], pid: int, since: float, appears: float, last: float = math.inf
) -> Path | None:
    """The core dump once its size stands. None if there is none in time.

    last: the monotonic time at which it is given up in any case. Raises LargeError.
    """
    end, before, stands = min(time.monotonic() + appears, last), -1, 0.0
    while True:
        core, now = coredump.find(environ, pid, since), time.monotonic()
        if core is None:
            if now >= end:
                return None
        else:
            coredump.refuse_large(environ, core)
            try:
                size = core.stat().st_size
            except OSError:
                return None
            if before < 0:
                end = min(now + WRITTEN, last)
            if size != before:
                before, stands = size, now
            if size > 0 and now >= stands + STANDS:
                return core
            if now >= end:
                return None
        time.sleep(0.1)


def autopsy(core: Path, dump: Path, seconds: float = SECONDS) -> tuple[dict[str, Any], str]:
    """What ``g4debug autopsy`` says of a core dump, and has put into the dump; or why not."""
    command = [*COMMAND, "--json", "--write", str(core), str(dump)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:  # without "with", which would wait for a child that waits for a disk
        process = subprocess.Popen(command, env=clean, stdin=null, stdout=pipe, stderr=pipe)
    except OSError as e:
        return {}, str(e)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED)
        for end in filter(None, (process.stdout, process.stderr)):
            end.close()
        return {}, f"{TOO_LONG} {seconds:.0f} s"
    if process.returncode:
        # The name of the file is in front of the reason, and may be long.
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {}, f"exit code {process.returncode}: {' '.join(last).replace(str(core), core.name)}"
    try:
        found = json.loads(out)
    except ValueError:
        found = None
    return (found, "") if isinstance(found, dict) else ({}, "it did not print JSON")
