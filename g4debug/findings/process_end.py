"""How a process has ended, as far as others can see it: its signal, and whether memory ran out.

Nothing here takes the exit status away from whoever waits for the process. Linux only.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing import process as multiprocessing_process
from pathlib import Path

from g4debug.findings import launch_memory

CGROUPS = Path("/sys/fs/cgroup")
_EXIT_CODE = 49  # the field behind the name in /proc/PID/stat
_BEGAN = 19
STORED = 0.5  # seconds within which another thread stores the status that it has taken
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by a person, or a service


@dataclass(frozen=True)
class End:
    """signal: that it died of, 0 for none. code: its exit code, -1 if not known."""

    signal: int = 0
    code: int = -1

    @property
    def known(self) -> bool:
        return bool(self.signal) or self.code >= 0

    @property
    def asked(self) -> bool:
        """It ended by itself, or somebody asked it to end."""
        return self.code == 0 or self.signal in ASKED

    @property
    def words(self) -> str:
        """``signal 9 (SIGKILL)``, or ``exit code 3``."""
        if self.signal:
            try:
                return f"signal {self.signal} ({signal.Signals(self.signal).name})"
            except ValueError:  # a real-time signal
                return f"signal {self.signal}"
        return f"exit code {self.code}" if self.code >= 0 else "not known: nobody saw it"


def began(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start; -1 if there is none.

    With its number it names a process: another one may get the number later.
    """
    fields = launch_memory.stat(pid)
    return int(fields[_BEGAN]) if len(fields) > _BEGAN else -1


def runs(pid: int, since: int) -> bool:
    """True if the process that began then still runs, or if that cannot be seen."""
    return launch_memory.is_alive(pid) and began(pid) in (since, -1)


def of(pid: int) -> End:
    """How a process ended that has just ended. Unknown if somebody has taken its status away."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return _of_zombie(pid)
    if found is None:
        return End()
    if found.si_code == os.CLD_EXITED:
        return End(code=found.si_status)
    return End(signal=found.si_status)


def _of_zombie(pid: int) -> End:
    """Of a process that another one has started, or that was waited for in this one."""
    fields = launch_memory.stat(pid)
    if fields and fields[0] == "Z" and len(fields) > _EXIT_CODE:
        return _of_status(int(fields[_EXIT_CODE]))
    return _of_child(pid)


def _of_child(pid: int) -> End:
    """multiprocessing keeps the status of a child that it has waited for.

    A thread that has just taken the status from the kernel may not have stored it yet.
    """
    of = [
        getattr(p, "_popen", None) for p in tuple(getattr(multiprocessing_process, "_dangling", ()))
    ]
    popen = next((p for p in of if getattr(p, "pid", None) == pid), None)
    end = time.monotonic() + STORED
    while popen is not None:
        code = getattr(popen, "returncode", None)
        if isinstance(code, int):
            return End(signal=-code) if code < 0 else End(code=code)
        if time.monotonic() > end:
            break
        time.sleep(0.005)
    return End()


def _of_status(status: int) -> End:
    if os.WIFSIGNALED(status):
        return End(signal=os.WTERMSIG(status))
    return End(code=os.WEXITSTATUS(status))


def oom_kills() -> dict[str, int]:
    """How many processes the OOM killer has killed: in this process's cgroup, and on this host.

    Key -> count. The key of a cgroup is its inode, because a container that is started again has
    another one. What the system does not tell is left out.
    """
    found = {}
    for folder, name in cgroups():
        try:
            text = (folder / name).read_text()
            count = _field(text, "oom_kill")
            if count >= 0:
                found[f"cgroup {folder.stat().st_ino}"] = count
                break
        except OSError:
            continue
    try:
        count = _field(Path("/proc/vmstat").read_text(), "oom_kill")
        if count >= 0:
            found["host"] = count
    except OSError:
        pass
    return found


def cgroups() -> list[tuple[Path, str]]:
    """Where this process's cgroup may be, and the file in it with the count of kills: version 2,
    then 1."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            # In a container the path may be the host's, and the container's own is the top.
            found += [(CGROUPS / inside, "memory.events"), (CGROUPS, "memory.events")]
        elif "memory" in controllers.split(","):
            top = CGROUPS / "memory"
            found += [(top / inside, "memory.oom_control"), (top, "memory.oom_control")]
    return found


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return -1
