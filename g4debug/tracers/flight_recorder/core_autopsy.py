"""Puts the autopsy of a CUDA core dump into the dump of the process that crashed.

It is made in a process of its own, because the one that crashed has a dead CUDA context and may
hang, and because a core dump may hold anything: it gets so many seconds and no more. If it cannot
be made, dump and core dump stay as they are.
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

from g4debug.tracers.flight_recorder import coredump

APPEARS = 8.0  # seconds in which a core dump must have begun behind the error
WRITTEN = 10.0  # and those that it may take to be written
SECONDS = 15.0  # that the autopsy may take
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
    core = whole(environ, pid, since, APPEARS if wait else 0.0)
    if core is None:
        late = coredump.find(environ, pid, since)
        if late is not None:
            logger.error(
                "g4debug: the driver had not written all of %s in %.0f s. Later, run: "
                "g4debug autopsy --write %s %s",
                late,
                WRITTEN,
                late,
                dump,
            )
        elif wait:
            logger.error(
                "g4debug: no CUDA core dump began to appear in %.0f s, so there is no autopsy of "
                "this crash. If one is there later, run: g4debug autopsy --write CORE %s",
                APPEARS,
                dump,
            )
        return
    found, problem = autopsy(core, dump)
    if problem:
        logger.error("g4debug: no autopsy of %s: %s", core, problem)
        return
    logger.error("g4debug: the CUDA core dump says: %s", found.get("verdict", ""))
    if remove and coredump.is_ours(environ):
        with contextlib.suppress(OSError):
            core.unlink()


def whole(environ: Mapping[str, str], pid: int, since: float, appears: float) -> Path | None:
    """The core dump once the driver has written all of it. None if there is none in time."""
    end, before = time.monotonic() + appears, -1
    while True:
        core = coredump.find(environ, pid, since)
        if core is None:
            if time.monotonic() >= end:
                return None
        else:
            if before < 0:
                end = time.monotonic() + WRITTEN
            try:
                size = core.stat().st_size
            except OSError:
                return None
            if size == before > 0:
                return core
            if time.monotonic() >= end:
                return None
            before = size
        time.sleep(0.1)


def autopsy(core: Path, dump: Path, seconds: float = SECONDS) -> tuple[dict[str, Any], str]:
    """What ``g4debug autopsy`` says of a core dump, and has put into the dump; or why not."""
    command = [*COMMAND, "--json", "--write", str(core), str(dump)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command, env=clean, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {}, f"it took more than {seconds:.0f} s"
    except OSError as e:
        return {}, str(e)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        return {}, f"exit code {done.returncode}: {' '.join(last)[:200]}"
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    return (found, "") if isinstance(found, dict) else ({}, "it did not print JSON")
