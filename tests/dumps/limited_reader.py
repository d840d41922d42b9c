"""Reads files as dumps, and says how long that took and how much memory.

``limited_reader.py MEGABYTES FILE...``: each file is read in two processes of its own, by ``show``
(whole) and by ``list`` (its head). A process may have at most so many megabytes of address space
more than it has with g4debug loaded; 0 sets no limit. Prints one line of JSON for each file: for
``show`` and ``list``, the seconds of processor time, the megabytes that were needed more at the
peak, and the error, or ''.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from g4debug.dumps import errors, incidents, reading


def status(name: str) -> float:
    """A size of this process in megabytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) / 1024


def measure(path: Path, command: str, megabytes: int) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    if megabytes:
        limit = int(status("VmSize") + megabytes) << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    start = time.process_time()
    error = ""
    try:
        if command == "show":
            reading.read(path)
        else:
            error = incidents.look(path).broken
    except errors.DumpError as e:
        error = str(e)
    seconds = time.process_time() - start
    return {"seconds": seconds, "megabytes": status("VmHWM") - before, "error": error}


def apart(path: Path, command: str, megabytes: int) -> dict[str, Any]:
    """What ``measure`` says in a process of its own."""
    read, told = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(told, json.dumps(measure(path, command, megabytes)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(told)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    if not said:
        sys.exit(f"{path}: {command} failed")
    found: dict[str, Any] = json.loads(said)
    return found


def main() -> None:
    megabytes, paths = int(sys.argv[1]), [Path(p) for p in sys.argv[2:]]
    for path in paths:
        said = {command: apart(path, command, megabytes) for command in ("show", "list")}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
