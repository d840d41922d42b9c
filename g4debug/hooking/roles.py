"""The role of a process in SGLang: told by the functions that it calls, not by its parent.

SGLang loads its plugins at the beginning of the functions that make a process what it is, so these
are on the stack when g4debug is registered. A process that somebody else started may be a server,
too: ``http_server_engine.py`` runs ``launch_server`` in a child of its own. Where the stack says
nothing (a script that loads the plugins by itself), what the process calls later corrects it: see
:class:`Role`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from types import FrameType

SERVER, SCHEDULER = "server", "scheduler"
# SGLang's functions in which a process is no server. From 0.5.23 on all of them load plugins.
CALLED = {
    "run_scheduler_process": SCHEDULER,
    "run_detokenizer_process": "detokenizer",
    "run_data_parallel_controller_process": "data_parallel_controller",
}
# The functions of a process that starts the others; for a method, the class decides.
LAUNCHES = ("launch_server", "run_server", "serve", "_launch_subprocesses")


def calling(frame: FrameType | None) -> str:
    """The role of the innermost function of SGLang on the stack that has one, '' if none has."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("sglang."):
            name = frame.f_code.co_name
            if name in CALLED:
                return CALLED[name]
            if name in LAUNCHES or frame.f_code.co_qualname == "Engine.__init__":
                return SERVER
        frame = frame.f_back
    return ""


def by_stack() -> str:
    """The role of this process, from what runs in it now."""
    found = calling(sys._getframe(1))
    if found:
        return found
    return SERVER if multiprocessing.parent_process() is None else SCHEDULER


class Role:
    """The role of this process as far as it is known by now. name: one of those above.

    guessed: nothing that runs says it, only that another Python process started this one. pid: of
    the process that has the role. A process that is forked inherits the object, and may go on to
    start a server of its own.
    """

    def __init__(self) -> None:
        self.name = by_stack()
        self.guessed = self.name == SCHEDULER and not calling(sys._getframe(1))
        self.pid = os.getpid()

    def launches(self) -> bool:
        """This process is about to start the others of a server. True if that is news."""
        news = self.name != SERVER or self.pid != os.getpid()
        self.name, self.guessed, self.pid = SERVER, False, os.getpid()
        return news

    def schedules(self) -> None:
        """This process makes a scheduler."""
        self.name, self.guessed, self.pid = SCHEDULER, False, os.getpid()
