"""Collects the status of a running server for ``g4debug doctor --pid``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4debug.dumps.plain import tracers
from g4debug.findings.launch_memory import stat
from g4debug.findings.status_file import StatusFileError, read
from g4debug.hooking import plugins
from g4debug.reporters.running import Process, Server
from g4debug.settings import Settings, SettingsError

# An idle event loop makes a round at least once in a second. A long prefill on a CPU takes some.
LATE = 15.0


def look(pid: int) -> Server:
    """The process ``pid`` and all that it has started."""
    return Server(pid, [_process(p, p == pid) for p in (pid, *_descendants(pid))])


def _descendants(pid: int) -> list[int]:
    """The processes that were started by this one, directly or not, in order of their numbers.

    From ``/proc`` alone, because psutil comes only with SGLang.
    """
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = stat(int(entry.name))
        if len(fields) > 1:  # it has not ended meanwhile
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        todo = sorted(child for parent in todo for child in parents.get(parent, ()))
        found += todo
    return found


def _process(pid: int, asked: bool) -> Process:
    process = Process(pid=pid, title=_title(pid), asked=asked, python=_is_python(pid))
    try:
        told = read(pid)
        if told is None:
            process.problem = _why_nothing(pid)
            process.expected = asked
        else:
            _fill(process, told)
    except StatusFileError as e:
        process.problem = str(e)
        process.expected = True
    except (ValueError, TypeError) as e:  # json's errors are ValueErrors
        process.problem = f"its status cannot be understood: {e}"
        process.expected = True
    return process


def _fill(process: Process, told: Mapping[str, Any]) -> None:
    process.has_status = True
    process.role = str(told.get("role", ""))
    process.about = {
        k: str(told[k])
        for k in ("version", "arms", "mode", "dumps", "faults", "started")
        if told.get(k)
    }
    process.rank = str(told.get("rank", ""))
    process.serves = str(told.get("serves", ""))
    process.phase = str(told.get("phase", ""))
    process.step = int(told.get("step", -1))
    process.stands = str(told.get("stands", ""))
    process.warnings = tuple(str(line) for line in told.get("warnings", ()))
    process.waits = tuple(str(line) for line in told.get("waits", ()))
    process.tracers = tracers(told.get("tracers", ()))
    process.age = max(0.0, time.monotonic() - float(told.get("told", 0.0)))
    process.stuck = process.phase == "serving" and process.age > LATE
    process.stopped = is_stopped(process.pid)


def is_stopped(pid: int) -> bool:
    """True if a signal or a debugger keeps a process from running, as far as that can be seen."""
    return stat(pid)[:1] in (["T"], ["t"])


def _title(pid: int) -> str:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096]
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode(errors="replace").strip()


def _is_python(pid: int) -> bool:
    """True also if it cannot be seen, so that nothing is hidden that might be one."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")).lower()
    except OSError:
        return True


def _environ(pid: int) -> dict[str, str] | None:
    """The variables that the process was started with, None if they may not be seen."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (item.decode(errors="replace").partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def _why_nothing(pid: int) -> str:
    """Why a process has no status, as far as its environment tells."""
    environ = _environ(pid)
    if environ is None:
        return "no status; whether anything was asked for in its environment may not be seen"
    left_out = plugins.left_out(environ)
    if left_out:
        return f"no status: {left_out}"
    try:
        asked = bool(Settings.from_environ(environ).tracers)
    except SettingsError as e:
        return f"no status; its environment is wrong: {e}"
    if not asked:
        return "no status: no tracer is armed, SGLANG_TRTLLM_MHA_DEBUG=1 was not set at its start"
    return (
        "no status, although its environment arms tracers: it loads no plugins (only SGLang's "
        "server and schedulers do), has not come so far yet, or its Python has no g4debug"
    )
