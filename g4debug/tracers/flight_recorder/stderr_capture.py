"""Reads CUDA's messages back from stderr. It changes nothing about stderr.

When an assertion fails in a kernel, each of its threads leaves a message, and the CUDA driver
writes the messages to file descriptor 2 "after synchronization with the host", in the call that
finds the error (NVIDIA's CUDA C++ Programming Guide, section "Assertion"). So they are written
once, from C, before PyTorch raises anything. A reader between the process and its stderr would have
to be there before that, and nobody knows when: any call that waits for the device may be the one.

Such a reader would see the messages, and make things worse. A pipe with a thread that copies it
loses the text that is still in the pipe when the process aborts, calls ``_exit`` or is killed, and
that is when its last words matter. A process that copies the pipe is one of the server's children,
which SGLang kills, or it outlives them; and if it stops reading, the server blocks. A file in place
of stderr takes the words from where somebody waits for them. So file descriptor 2 is left as it is.

But very often it *is* a file (``… > server.log 2>&1``, ``nohup``, a batch system). The text in a
file can be read through a descriptor of our own, after the process has failed. That costs nothing
before, and can neither lose nor delay a byte. Where stderr is a pipe, a terminal or a socket, the
text is in the log of whoever reads the other end, and ``why`` says so; ``g4debug show <dump> --log
<that log>`` puts both together.

Processes that share a stderr share its file. The writer of a line cannot be told.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable

STDERR = 2
MOST = 16 << 20  # bytes that are read, from the end; a thread's line has about 200
PATIENCE = 1.0  # seconds to wait for another thread of this process that is still printing
POLL = 0.05


class Printed:
    """The text on stderr since this was made, from this process and all that share its stderr.

    why: why the text cannot be read, '' if it can.
    """

    def __init__(self) -> None:
        self.why, self._begin = "", 0
        try:
            found = os.fstat(STDERR)
        except OSError as e:
            self.why = f"stderr cannot be looked at ({e.strerror})"
            return
        self._begin = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.why = f"stderr is {_what(found.st_mode)}"

    def text(self) -> str:
        """The end of the text, at most MOST bytes. Raises nothing: ``why`` tells a failure."""
        if self.why:
            return ""
        try:
            # A descriptor of our own: this one may be write-only, and its position is the server's.
            mine = os.open(f"/proc/self/fd/{STDERR}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return self._read(mine).decode(errors="replace")
            finally:
                os.close(mine)
        except OSError as e:
            self.why = f"the file that stderr goes to cannot be read ({e.strerror})"
            return ""

    def wait_for(self, done: Callable[[str], bool]) -> str:
        """The text, as soon as it is ``done`` and did not grow any more; or after PATIENCE.

        The thread that found the error prints before it raises. But another one may have found it.
        """
        text, end = self.text(), time.monotonic() + PATIENCE
        while not self.why and time.monotonic() < end:
            time.sleep(POLL)
            before, text = text, self.text()
            if done(text) and len(text) == len(before):
                break
        return text

    def _read(self, fd: int) -> bytes:
        size = os.fstat(fd).st_size
        begin = self._begin if self._begin <= size else 0  # it is smaller: it was cut off
        at, parts = max(begin, size - MOST), []
        while at < size and (part := os.pread(fd, min(size - at, 1 << 20), at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)


def _what(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a terminal or another device" if stat.S_ISCHR(mode) else "no file"
