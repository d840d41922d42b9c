"""A process of a replay ends when the one that started it is gone, however that ended."""

from __future__ import annotations

import ctypes
import signal

_LIBC = ctypes.CDLL(None)  # loaded here: a fork that is about to run a program should load nothing
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask for it, in the process that is to end. A fork of it has to ask again."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
