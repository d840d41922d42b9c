"""Puts the autopsy of a CUDA core dump into the dump of the process that crashed.

It is made in a process of its own, because the one that crashed has a dead CUDA context and may
hang, and because a core dump may hold anything: it gets so many seconds and no more. So does the
disk. If it cannot be made, dump and core dump stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4debug.dumps import patience
from g4debug.tracers.flight_recorder import coredump

APPEARS = 8.0  # seconds in which a core dump must have begun behind the error
WRITTEN = 10.0  # and those that it may take to be written
STANDS = 0.5  # in which its size must not have changed: then it may be whole
DISK = 5.0  # that its disk may take to answer, beside that
SECONDS = 15.0  # that the autopsy may take
KILLED = 1.0  # that it may take to end once it was killed; one that waits for a disk does not
# What the autopsy says of a file of which a part is not written yet.
HALF = ("it is cut off", "it is empty", "it is not a 64-bit ELF file")
# -P: a folder "g4debug" where the server was started is not the package.
COMMAND = (sys.executable, "-P", "-m", "g4debug", "autopsy")
logger = logging.getLogger("g4debug")


def put_into(
    dump: Path, environ: Mapping[str, str], pid: int, since: float, *, wait: bool, remove: bool
) -> None:
    """Find the core dump of the process, put its autopsy into ``dump``, and log what it says.

    since: as of :func:`coredump.find`. wait: the file may not be there yet. remove: remove it
    afterwards, if it is one that we let the driver write.
    """
    folder, appears = coredump.folder(environ), APPEARS if wait else 0.0
    try:
        core, late = patience.within(
            folder, lambda: _look(environ, pid, since, appears), appears + WRITTEN + DISK
        )
    except patience.HungDiskError as e:
        logger.error("g4debug: no autopsy of this crash: %s", e)
        return
    if core is None:
        if late is not None:
            _say_half(late, dump)
        elif wait:
            logger.error(
                "g4debug: no CUDA core dump began to appear in %.0f s, so there is no autopsy of "
                "this crash. If one is there later, run: g4debug autopsy --write CORE %s",
                APPEARS,
                dump,
            )
        return
    end = time.monotonic() + WRITTEN
    found, problem = autopsy(core, dump)
    # A disk that had stopped for a moment may go on: the size says only that it may be whole.
    while any(words in problem for words in HALF) and time.monotonic() < end:
        time.sleep(STANDS)
        found, problem = autopsy(core, dump)
    if any(words in problem for words in HALF):
        _say_half(core, dump)
    if problem:
        logger.error("g4debug: no autopsy of %s: %s", core, problem)
        return
    said = [str(found.get(name, "")) for name in ("verdict", "cause", "kernel", "exception")]
    logger.error("g4debug: the CUDA core dump says: %s", "; ".join(filter(None, said)))
    if remove and coredump.is_ours(environ):
        with contextlib.suppress(OSError, patience.HungDiskError):
            patience.within(folder, core.unlink, DISK)


def _say_half(core: Path, dump: Path) -> None:
    logger.error(
        "g4debug: the driver had not written all of %s in %.0f s. Later, run: "
        "g4debug autopsy --write %s %s",
        core,
        WRITTEN,
        core,
        dump,
    )


def _look(
    environ: Mapping[str, str], pid: int, since: float, appears: float
) -> tuple[Path | None, Path | None]:
    """The core dump if it is whole, and else the one that there is."""
    core = whole(environ, pid, since, appears)
    return core, coredump.find(environ, pid, since) if core is None else None


def whole(environ: Mapping[str, str], pid: int, since: float, appears: float) -> Path | None:
    """The core dump once its size stands. None if there is none in time."""
    end, before, stands = time.monotonic() + appears, -1, 0.0
    while True:
        core, now = coredump.find(environ, pid, since), time.monotonic()
        if core is None:
            if now >= end:
                return None
        else:
            try:
                size = core.stat().st_size
            except OSError:
                return None
            if before < 0:
                end = now + WRITTEN
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
        return {}, f"it took more than {seconds:.0f} s"
    if process.returncode:
        # The name of the file is in front of the reason, and may be long.
        last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {}, f"exit code {process.returncode}: {' '.join(last).replace(str(core), core.name)}"
    try:
        found = json.loads(out)
    except ValueError:
        found = None
    return (found, "") if isinstance(found, dict) else ({}, "it did not print JSON")
