"""Forks processes that have SGLang's imports behind them; see warm.py, which starts it.

``warm_server.py FD``: FD is a socket on which each message asks for one process. A message is
JSON (``argv``, ``environ``, ``folder``, ``fds``, ``spares``) and two descriptors or more: its log,
a pipe that is told the process's number and, in the end, its exit status, and those that it gets
by the numbers in ``fds``. It ends when the socket is closed, and with it all that it forked.

Nothing here replaces what SGLang does: modules are imported as each of its processes imports them
before it loads its plugins, and no plugin is loaded; only the registry of hooks searches fewer of
these modules, see hook_search.py. Modules of g4debug are imported, too, which do nothing until
SGLang loads its plugins. What ``multiprocessing`` would start with the
same imports, SGLang's scheduler and detokenizer, is forked just as early: a child of the process
that asks for it, with that one's environment, working folder and log.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from typing import Any, NoReturn

LARGEST = 1 << 18  # bytes of a message: an environment and a command line
FRAME = 1 << 17  # values in a frame: a megabyte, and the piece for it has two
HIGH = 1000  # descriptors from here on are in nobody's way
imported: dict[str, str] = {}  # what SGLang's import puts into the environment
Role = Callable[[], None]


def serve(control: socket.socket) -> Role | None:
    """Until the socket is closed. Returns, in each process that it forks, what that one does."""
    living: dict[int, tuple[int, int]] = {}  # by pidfd: the process, its pipe
    while True:
        watched: list[Any] = [control, *living]
        ready, _, _ = select.select(watched, [], [])
        for pidfd in living.keys() & set(ready):
            pid, report = living.pop(pidfd)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
                os.write(report, f"{status}\n".encode())
            os.close(report)
            os.close(pidfd)
        if control not in ready:
            continue
        message, (log, report, *fds), _, _ = receive(control, 2)
        if not message:
            for orphan, _ in living.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(orphan, signal.SIGKILL)
            return None
        pid = os.fork()
        if pid == 0:
            control.close()
            for pidfd, (_, other) in living.items():
                os.close(pidfd)
                os.close(other)
            return lambda: command(json.loads(message), log, report, fds)
        for fd in (log, *fds):
            os.close(fd)
        living[os.pidfd_open(pid)] = (pid, report)


def receive(source: socket.socket, count: int) -> tuple[bytes, list[int], int, object]:
    """``count`` descriptors come with a message; none with the end of the conversation."""
    message, fds, flags, address = socket.recv_fds(source, LARGEST, max(count, 16))
    return message, fds or [-1] * count, flags, address


def command(order: dict[str, Any], log: int, report: int, fds: list[int]) -> None:
    """A Python script with its arguments, in a session of its own."""
    os.setsid()  # before it is known: who knows it may kill its group
    os.write(report, f"{os.getpid()}\n".encode())
    os.close(report)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    renumber(fds, order["fds"])
    settle(order)
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(order["spares"]):
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for _, other in [*spares, (0, mine)]:
                other.close()
            spare(its)
            return
        its.close()
        spares.append((pid, mine))
    start = util.spawnv_passfds

    def start_or_wake(path: bytes, arguments: list[str], fds: list[int]) -> int:
        if "--multiprocessing-fork" not in arguments or not spares:
            return start(path, arguments, fds)
        pid, its = spares.pop(0)
        order = {"code": arguments[arguments.index("-c") + 1], "environ": dict(os.environ)}
        message = json.dumps({**order, "folder": os.getcwd(), "fds": fds}).encode()
        socket.send_fds(its, [message], fds)
        its.close()
        return pid

    util.spawnv_passfds = start_or_wake  # type: ignore[assignment]
    sys.argv = order["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def spare(source: socket.socket) -> None:
    """Wait to be what ``multiprocessing`` starts; end if that never comes."""
    high = fcntl.fcntl(source.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    source.close()
    with socket.socket(fileno=high) as source:
        message, received, _, _ = receive(source, 0)
    if not message:
        return
    order = json.loads(message)
    renumber(received, order["fds"])  # the pickled process speaks of them by number
    settle(order)
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(order["code"], {"__name__": "__main__"})


def renumber(received: list[int], numbers: list[int]) -> None:
    """Descriptors that were received get these numbers."""
    raised = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(raised, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def settle(order: dict[str, Any]) -> None:
    """What a new process inherits; PYTHONPATH, which Python reads when it starts."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update({**order["environ"], **imported})
    wanted = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*wanted, *(p for p in sys.path if p not in wanted)]


def stand_ins() -> set[str]:
    """What SGLang imports of g4debug, from 0.5.18 on: the CPU engine's kernels of sgl_kernel."""
    known = {"g4debug", "g4debug.hooking", "g4debug.hooking.targets"}
    return known | {name for name in sys.modules if name.startswith("g4debug.cpu")}


def import_ours() -> None:
    """What g4debug imports and reads when it is armed, 0.3 s of a core for each process.

    It hangs on no variable and no argument: a fix looks at SGLang's sources for its bug.
    """
    from g4debug import discovery, plugin  # noqa: F401

    for name in discovery.names("tracer"):
        discovery.load("tracer", name)
    for name in discovery.names("fix"):
        fix = discovery.load("fix", name)
        with contextlib.suppress(ImportError, AttributeError):  # this release has no such code
            fix.still_broken()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    hook_search = importlib.import_module("hook_search")
    del sys.modules["hook_search"], sys.path[0]  # this folder, which nobody else has there
    before = dict(os.environ)
    import setproctitle
    import sglang.srt.managers.scheduler  # noqa: F401  # the others import little more

    others = [n for n in sys.modules if n.split(".")[0] == "g4debug" and n not in stand_ins()]
    import_ours()
    hook_search.shorten()
    setproctitle.getproctitle()  # finds the place of the title by the environment, now or never

    imported.update(os.environ.items() - before.items())
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1 or others:
        sys.exit(f"warm_server: got {len(threads)} threads and {others}, expected SGLang alone")
    gc.freeze()  # what is imported stays, in pages that all of them share
    control.send(b"ready")
    end(serve(control))


def roomy(role: Role) -> None:
    """Call it with room for its Python frames in one piece of memory.

    CPython has them in pieces of 16 KB, and gives the last piece back as soon as no frame is in it.
    SGLang's stack is so deep that now and then the calls of a loop, such as those of Triton's
    interpreter, begin at the end of a piece. Each of them then maps memory and unmaps it: a third
    of the time of such a process. A frame that is larger than a piece gets one of its own, with as
    much again behind it, where all others have room.
    """
    role()


roomy.__code__ = roomy.__code__.replace(co_stacksize=FRAME)


def end(role: Role | None) -> NoReturn:
    """Play the role, and end as Python does, but for one thing: what SGLang's import made is left
    to the kernel. Python would take it apart, object by object, which takes 2.5 s of a core for
    each process, also for a spare that nobody has woken.
    """
    status: Any = 0
    try:
        if role is not None:
            roomy(role)
    except SystemExit as e:
        status = e.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
