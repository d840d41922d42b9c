"""Bounds the memory of a replay: a dump may be of a large server, or come from a stranger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from g4debug.findings import process_end

SHARE = 0.75  # of the memory that is free when a replay begins
# Of a cgroup, by its file with the count of kills: its limit, what is in use, and what of that is
# files that nobody uses, in memory.stat.
FILES = {
    "memory.events": ("memory.max", "memory.current", "inactive_file"),
    "memory.oom_control": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def most() -> int:
    """So many bytes of memory may the replay's process take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(SHARE * min(1024 * int(free), *_in_cgroups()))


def _in_cgroups() -> Iterator[int]:
    """The free memory of this process's cgroups, which may be fewer than the machine's.

    There the OOM killer comes first, for example in a container.
    """
    yield 1 << 62  # there may be no limit
    for folder, name in process_end.cgroups():
        limit, used, files = FILES[name]
        for place in (folder, *folder.parents):
            if place.is_relative_to(process_end.CGROUPS):
                try:
                    numbers = [int((place / file).read_text()) for file in (limit, used)]
                    stat = (place / "memory.stat").read_text().splitlines()
                except (OSError, ValueError):  # "max" is no limit
                    continue
                unused = sum(int(x.split()[1]) for x in stat if x.split()[:1] == [files])
                yield max(0, numbers[0] - numbers[1] + unused)


def taken(pid: int) -> int:
    """So many bytes of memory does a process take, 0 if there is none."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def too_much(limit: int) -> str:
    share = f"{SHARE:.0%} of what was free here"
    return f"it took more than {limit / (1 << 30):.1f} GiB of memory, {share}"
