"""A process that `multiprocessing` starts ends when the one that started it is gone.

SGLang's scheduler and detokenizer ask for that themselves (PR_SET_PDEATHSIG), but only after some
four seconds of imports. Linux sends no signal for a parent that ended before it was asked: a
server that is told to end in that time would leave its detokenizer behind, which waits for ever.
"""

import ctypes
import os
import re
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask for it now, at the start of the process. In other processes it does nothing."""
    if not sys.platform.startswith("linux") or "--multiprocessing-fork" not in sys.orig_argv:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent keeps its end of this pipe open until it ends; that may have been before we asked.
    pipe = re.search(r"pipe_handle=(\d+)", " ".join(sys.orig_argv))
    if pipe is None:
        return
    poll = select.poll()
    poll.register(int(pipe[1]), 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os.kill(os.getpid(), signal.SIGKILL)
