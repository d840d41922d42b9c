"""Bounds the memory of a replay: a dump may be of a large server, or come from a stranger."""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 0.75  # of the memory that is free when a replay begins


def most() -> int:
    """So many bytes of memory may the replay's process take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(SHARE * 1024 * int(free))


def taken(pid: int) -> int:
    """So many bytes of memory does a process take, 0 if there is none."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def too_much(limit: int) -> str:
    share = f"{SHARE:.0%} of what was free on this machine"
    return f"it took more than {limit / (1 << 30):.1f} GiB of memory, {share}"
