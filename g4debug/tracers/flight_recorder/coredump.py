"""Finds the CUDA core dump of this process.

The CUDA driver writes one when a kernel faults, if ``CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1`` was set
when the process started. SGLang sets it, and the name of the file, in its own environment where
``SGLANG_CUDA_COREDUMP=1`` (``debug_utils/cuda_coredump.py``). Reads no device.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping

# In the name of the file the driver replaces these by host name, process id and time.
UNNAMED = "core_%t_%h_%p.nvcudmp"
_PART = re.compile(r"(%[hpt])")


def core_dump(environ: Mapping[str, str], pid: int, since: float) -> str:
    """Where the CUDA core dump is, in a sentence. '' if the driver was not told to write one.

    since: the Unix time at which this process was armed. Older files are of another process that
    had the same number, which is common in containers.
    """
    if environ.get("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") != "1":
        return ""
    named = environ.get("CUDA_COREDUMP_FILE") or UNNAMED
    parts = {"%h": "*", "%p": str(pid), "%t": "*"}
    pattern = "".join(parts.get(p) or glob.escape(p) for p in _PART.split(named))
    found = [(written, path) for path in glob.glob(pattern) if (written := _time(path)) >= since]
    if found:
        return f"CUDA core dump: {os.path.abspath(max(found)[1])}"
    return f"CUDA core dump: none yet; the driver was told to write it to {os.path.abspath(named)}"


def ends_the_process(environ: Mapping[str, str]) -> bool:
    """True if the driver was told to write a core dump, and to abort the process right after it.

    Then no exception reaches Python, and the flight recorder leaves no dump. SGLang sets such flags
    unless there are some already.
    """
    flags = environ.get("CUDA_COREDUMP_GENERATION_FLAGS", "").replace(" ", "").split(",")
    asked = environ.get("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") == "1"
    return asked and "skip_abort" not in flags


def _time(path: str) -> float:
    """When a file was last written, in Unix time. -1 if it cannot be read, or is no file."""
    try:
        return os.stat(path).st_mtime if os.path.isfile(path) else -1
    except OSError:
        return -1
