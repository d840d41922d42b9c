"""How a process ended, when others wait for it, too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

from g4debug.findings import process_end
from g4debug.findings.process_end import End


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_status_that_another_thread_has_taken_and_not_stored_yet():
    """SGLang's main thread joins its children, and may be between waitpid() and the store."""
    child = multiprocessing.get_context("fork").Process(target=_end)
    child.start()
    _, status = os.waitpid(child.pid, 0)

    def store() -> None:
        child._popen.returncode = os.waitstatus_to_exitcode(status)

    late = threading.Timer(0.1, store)
    late.start()
    try:
        assert process_end.of(child.pid) == End(signal=signal.SIGKILL)
    finally:
        late.join()


def test_a_status_that_nobody_stores_is_not_known(monkeypatch):
    monkeypatch.setattr(process_end, "STORED", 0.02)
    child = multiprocessing.get_context("fork").Process(target=_end)
    child.start()
    os.waitpid(child.pid, 0)
    assert not process_end.of(child.pid).known
    child._popen.returncode = 0


def test_a_child_that_nobody_has_waited_for_keeps_its_status():
    pid = os.fork()
    if not pid:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_end.of(pid) == End(code=3)
    assert os.waitpid(pid, 0)[0] == pid
