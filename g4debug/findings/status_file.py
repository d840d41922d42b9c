"""Shows this process's status to ``g4debug doctor --pid``, and reads another process's status.

A process writes its status into a piece of memory that has a name but lies in no folder
(``memfd_create``). Others find it as an open file of the process, in ``/proc/PID/fd``. So it needs
no directory, nobody else may read it, it cannot be taken for another process's, and it is gone with
the process, however that ends. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

NAME = "g4debug-status"
FORMAT = 1
MAX_BYTES = 1 << 20
_HEAD = re.compile(rb"g4debug-status (\d+) (\d+) ([0-9a-f]{8})\n")
_HEAD_BYTES = 64
_ASKED_AT = _HEAD_BYTES + MAX_BYTES  # behind the status: what somebody asks the process for
ASKED_BYTES = 16
_TRIES = 20  # a reader may meet a half-written status; a write takes microseconds


class StatusFileError(Exception):
    """The status cannot be shown or read. The text says why."""


class StatusFile:
    """The memory that this process shows. Raises StatusFileError if there can be none."""

    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create(NAME)  # not inherited by programs that are started
        except (AttributeError, OSError) as e:
            raise StatusFileError(f"this system has no memfd_create ({e})") from e
        os.register_at_fork(after_in_child=self.close)  # a fork has no status of its own

    def write(self, content: Mapping[str, Any]) -> None:
        """Show ``content`` instead of the last one. Raises StatusFileError if it is too large."""
        body = json.dumps(content).encode()
        if len(body) > MAX_BYTES:
            raise StatusFileError(
                f"the status has {len(body)} bytes, at most {MAX_BYTES} are shown"
            )
        if self.fd >= 0:
            head = b"g4debug-status %d %d %08x\n" % (FORMAT, len(body), zlib.crc32(body))
            os.pwrite(self.fd, head + body, 0)

    def asked(self) -> bytes:
        """What was asked for last; another question has other bytes. b'' if nobody asked."""
        return os.pread(self.fd, ASKED_BYTES, _ASKED_AT) if self.fd >= 0 else b""

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
            self.fd = -1


def read(pid: int) -> dict[str, Any] | None:
    """The content that the process ``pid`` shows, None if it shows nothing.

    Raises StatusFileError if there is no such process, its files may not be seen, or what it shows
    cannot be understood.
    """
    path = _path(pid)
    return None if path is None else _content(path)


def ask(pid: int, question: bytes) -> bytes:
    """Ask the process ``pid`` for a dump. ``question``: ASKED_BYTES that were not used before.

    Returns what was asked for before, for :func:`withdraw`. Raises StatusFileError if it cannot be
    asked.
    """
    path = _path(pid)
    if path is None:
        raise StatusFileError("it shows no status")
    try:
        with _opened(path) as fd:
            before = os.pread(fd, ASKED_BYTES, _ASKED_AT)
            os.pwrite(fd, question, _ASKED_AT)
    except OSError as e:
        raise StatusFileError(f"it cannot be asked: {e.strerror}") from e
    return before


def withdraw(pid: int, question: bytes, before: bytes) -> None:
    """Nobody waits for the answer any more. Nothing happens if another one has asked since.

    Else a process that was stopped would write, once it goes on, a dump for nobody. Raises
    StatusFileError if the process has gone.
    """
    path = _path(pid)
    if path is None:
        return
    try:
        with _opened(path) as fd:
            if os.pread(fd, ASKED_BYTES, _ASKED_AT) == question:
                os.ftruncate(fd, _ASKED_AT)
                os.pwrite(fd, before, _ASKED_AT)
    except OSError as e:
        raise StatusFileError(f"it cannot be told: {e.strerror}") from e


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def _path(pid: int) -> str | None:
    """Where the process's status is, None if it shows none."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except FileNotFoundError as e:
        here = "there is no such process" if os.path.isdir("/proc/self") else "there is no /proc"
        raise StatusFileError(here) from e
    except PermissionError as e:
        raise StatusFileError(
            "its files may not be seen; ask as the user that it runs as, or as root"
        ) from e
    except OSError as e:
        raise StatusFileError(f"{folder} cannot be read: {e.strerror}") from e
    for name in names:
        path = f"{folder}/{name}"
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).startswith(f"/memfd:{NAME} "):
                return path
    return None


def _content(path: str) -> dict[str, Any]:
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as e:
            raise StatusFileError(f"its status cannot be read: {e.strerror}") from e
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StatusFileError("its status is no regular file")
            data = os.pread(fd, _HEAD_BYTES + MAX_BYTES, 0)
        finally:
            os.close(fd)
        head = _HEAD.match(data)
        if head is not None:
            if int(head[1]) != FORMAT:
                raise StatusFileError(
                    f"its status has the format {int(head[1])}, this g4debug reads {FORMAT}; use "
                    "the g4debug that the server uses"
                )
            body = data[head.end() : head.end() + int(head[2])]
            if zlib.crc32(body) == int(head[3], 16):
                found = json.loads(body)
                if isinstance(found, dict):
                    return found
        time.sleep(0.01)
    raise StatusFileError("its status is damaged, or has not been written yet")
