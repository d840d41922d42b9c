"""Which kind of file system a folder lies on, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# Where a lock is seen by all who can see the file, and where space that was reserved stays so when
# the file is written again. Not on those that copy on write (btrfs, zfs): without space a write to
# a mapped file would end the process by SIGBUS there. Nor on those of a network.
HOLDING = ("ext4", "xfs", "tmpfs", "overlay")
MOUNTS = Path("/proc/self/mountinfo")


def kind(folder: Path) -> str:
    """For example ``ext4``; '' if it is not known. Raises OSError if the folder is not there."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text(errors="replace").splitlines():
            mount, _, of = line.partition(" - ")
            if mount.split()[2:3] == [wanted] and of:
                return of.split()[0]
    return ""
