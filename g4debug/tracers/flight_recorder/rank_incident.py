"""Makes one incident of the failures of all ranks of a launch, and ends it soon.

Each scheduler joins the memory that the ranks share, and a finding that stops one is told to the
others (:mod:`g4debug.findings.peer_ranks`). Then the server kills them all. In 0.5.23 it first
saves evidence of its own: it waits 5 s, asks py-spy for the stacks of the schedulers, and waits 60
s for core dumps of CUDA, while the other ranks hang in a collective. After a finding every rank has
left a dump by then, which says more, so that is skipped. After a crash of which no tracer has found
the reason, it is not.

The server kills by SIGKILL, its resource tracker, too, so the blocks of shared memory of its
processes stay in /dev/shm: 25 MB and more of each server that ended so. After a finding their names
are removed. A process that has mapped a block keeps it until it ends. A block that a process which
is not the server's has mapped, too, stays: it may be that one's own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from g4debug.dumps import launch
from g4debug.findings.launch_memory import LaunchMemoryError
from g4debug.findings.peer_ranks import PeerRanks
from g4debug.findings.steps import Recorder
from g4debug.hooking import roles
from g4debug.hooking.hooks import Order
from g4debug.tracers.base import Context
from g4debug.trapping.describe import Describer

# SGLang's own switches. Read each time, so that they may be set for one call.
SAVES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
# In /proc/PID/maps, at the end of a line. "(deleted)" would follow a name that is removed already.
SHARED = re.compile(r" /dev/shm/((?:psm_|sem\.mp-|sgl_|sglang_)[\w.-]+)$", re.M)
logger = logging.getLogger("g4debug")


def install(context: Context, part: roles.Role) -> None:
    """part: what this process is. A server's first process makes the memory that all others find.

    A process is one, whatever else it looked like, as soon as it checks the arguments of a server
    that it is about to start.
    """
    others, recorder = context.trap.others, context.recorder

    def share(how: Callable[[str], object]) -> None:
        try:
            how(os.environ.get(launch.VARIABLE, ""))
        except LaunchMemoryError as e:
            context.limit("a rank's finding is not told to the others", str(e))

    def launches(*args: Any, **kwargs: Any) -> None:
        if part.launches():
            name = launch.begin(server=True)
            if isinstance(context.trap.describe, Describer):
                context.trap.describe.launch = name
            share(others.make)

    if part.name == roles.SERVER:
        share(others.make)
    context.before("server_args.check", launches)
    if part.name == roles.SERVER or part.guessed:
        before_crash(context, others)

    def join(*args: Any, **kwargs: Any) -> None:
        share(others.join)

    def name(result: Any, *args: Any, **kwargs: Any) -> Any:
        name_ranks(others, recorder)
        return result

    context.before("scheduler.init", join)
    context.after("scheduler.init", name)


def name_ranks(others: PeerRanks, recorder: Recorder) -> None:
    """Enter the ranks of this process, as far as they are known by now."""
    ranks = recorder.ranks
    others.name_ranks(ranks.dp, ranks.tp, ranks.pp)


def before_crash(context: Context, others: PeerRanks) -> None:
    """Let the server skip SGLang's own evidence before a crash, if a finding caused it."""

    def around(call_next: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not others.found():
            return call_next(*args, **kwargs)
        with switched_off():
            result = call_next(*args, **kwargs)
        try:
            remove_shared_memory()
        except Exception:  # the server must end in any case
            logger.exception("g4debug: /dev/shm was not cleaned. Please report this.")
        return result

    context.hooks.around("server.before_crash", Order.TRACER, context.tracer_id, around)


def remove_shared_memory() -> None:
    """Remove the names of the blocks in /dev/shm that this process and its children have mapped.

    Removes only names that SGLang and Python's multiprocessing give, and none that a process has
    mapped that is not among them.
    """
    psutil: Any = importlib.import_module("psutil")  # SGLang needs it, too
    me = psutil.Process()
    ours = {p.pid for p in (me, *me.children(recursive=True))}
    found = set().union(*map(_mapped, ours))
    for pid in set(psutil.pids()) - ours if found else ():
        found -= _mapped(pid)
    for name in found:
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/shm/{name}")


def _mapped(pid: int) -> set[str]:
    """The blocks that a process has mapped; none if it has ended, or if it may not be looked at."""
    try:
        return set(SHARED.findall(Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")))
    except OSError:
        return set()


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """SGLang saves no stacks and no core dumps meanwhile, unless the user has asked for them."""
    ours = [name for name in SAVES if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "0"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
