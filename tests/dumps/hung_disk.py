"""A real file system that hangs: FUSE, with nobody who answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

MNT_DETACH = 2  # also while a thread is still on its way out of it


@contextlib.contextmanager
def hung_disk(path: Path) -> Iterator[None]:
    """Every call on ``path`` hangs inside the block, and fails behind it.

    Raises OSError where this user may not mount anything.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    fd = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        where = os.fsencode(path)
        if libc.mount(b"hung", where, b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), f"cannot mount: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            os.close(fd)  # who waits gets an error
            fd = -1
            libc.umount2(where, MNT_DETACH)
    finally:
        if fd >= 0:
            os.close(fd)
