"""The server's main process: whose black box it takes; its end does not wait for itself."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import real_cores
from black_boxes import step

from g4debug.dumps.reading import read
from g4debug.findings import black_box, process_end
from g4debug.findings.black_box import BlackBox, Owner
from g4debug.hooking import roles
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import coredump, scheduler_watch
from g4debug.tracers.flight_recorder.scheduler_watch import SchedulerWatch


@pytest.fixture
def watch(tmp_path, monkeypatch):
    (tmp_path / "boxes").mkdir()
    monkeypatch.setattr(black_box.paths, "__defaults__", (tmp_path / "boxes",))
    context = Context.alone("flight-recorder", Settings(debug_dir=tmp_path / "dumps"))
    made = SchedulerWatch(context, roles.Role())
    made.pid = os.getpid()
    return made


def box_of(tmp_path, pid: int, began: int) -> BlackBox:
    dumps = str(tmp_path / "dumps")
    box = BlackBox(
        Owner(pid, os.getpid(), began, time.time_ns(), "", "", dumps), tmp_path / "boxes"
    )
    box.step(*step(1))
    return box


def test_the_box_of_a_server_with_the_same_number_elsewhere_stays(watch, tmp_path):
    """Two containers with ``--ipc=host``: in both, the server is process 1."""
    mine = box_of(tmp_path, 77, process_end.began(os.getpid()))
    elsewhere = box_of(tmp_path, 77, process_end.began(os.getpid()) + 5)
    watch.before_kill(None)
    assert not mine.path.exists()
    assert elsewhere.path.exists()
    elsewhere._give_up()  # its process dies: it is not this server's scheduler
    watch._make(77)
    assert elsewhere.path.exists()
    assert not (tmp_path / "dumps").exists()


def test_it_looks_at_the_oom_killer_before_a_scheduler_ends(watch, monkeypatch):
    made = []
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"host": 3})
    monkeypatch.setattr(scheduler_watch.box_dumps, "collect", lambda *args: [])
    monkeypatch.setattr(watch, "_make", lambda pid: made.append([*watch.oom_kills]))
    gone = SimpleNamespace(schedulers=lambda: [0] if made else [2**22 + 7])
    monkeypatch.setattr(watch, "others", gone)
    watch._watch()  # ends at process 0, which there is none
    assert made == [[{"host": 3}]]


def test_a_scheduler_whose_dump_fails_does_not_end_the_watch_for_the_others(
    watch, monkeypatch, caplog
):
    """A bug of ours with one box, and with those of earlier launches."""
    made = []

    def fails(*args):
        raise AssertionError("a bug")

    monkeypatch.setattr(scheduler_watch.box_dumps, "collect", fails)
    monkeypatch.setattr(process_end, "of", lambda pid: made.append(pid) or fails())
    gone, other = 2**22 + 7, 2**22 + 8  # no process has such a number
    seen = SimpleNamespace(schedulers=lambda: [0] if other in made else [gone, other])
    monkeypatch.setattr(watch, "others", seen)
    watch._watch()  # ends at process 0, which there is none
    assert made == [gone, other]
    assert f"scheduler {gone}: no dump can be made" in caplog.text
    made.clear()
    monkeypatch.setattr(watch, "others", SimpleNamespace(schedulers=lambda: [gone, other]))
    watch._settle()
    assert made == [gone, other]


def test_a_shortage_of_descriptors_passes(watch, monkeypatch, caplog):
    """A server with many connections has none left for a second. Then the scheduler is watched."""
    caplog.set_level("INFO", "g4debug")
    made, asked = [], []
    real = os.pidfd_open
    gone = subprocess.Popen(["sleep", "1.5"])  # ends while it is watched

    def open_(pid):
        asked.append(pid)
        if len(asked) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", open_)
    monkeypatch.setattr(scheduler_watch, "LOOK", 0.05)
    monkeypatch.setattr(scheduler_watch.box_dumps, "collect", lambda *args: [])
    monkeypatch.setattr(watch, "_make", made.append)
    seen = SimpleNamespace(schedulers=lambda: [0] if made else [gone.pid])
    monkeypatch.setattr(watch, "others", seen)
    watch._watch()  # ends at process 0, which there is none
    gone.wait()
    assert made == [gone.pid]
    assert asked == [gone.pid] * 3 + [0]
    assert caplog.text.count("is not watched yet") == 1
    assert f"scheduler {gone.pid} is watched now" in caplog.text


def test_a_signal_while_the_dumps_are_made_does_not_wait_for_itself(watch, monkeypatch):
    """SIGQUIT comes in the main thread, in the middle of the end by Ctrl-C."""
    waited = []

    def made(pid):
        begin = time.monotonic()
        watch.before_kill(None)
        waited.append(time.monotonic() - begin)

    monkeypatch.setattr(scheduler_watch, "PATIENCE", 2.0)
    monkeypatch.setattr(watch, "_make", made)
    monkeypatch.setattr(watch, "others", SimpleNamespace(schedulers=lambda: [5]))
    watch._settle()
    assert len(waited) == 1
    assert waited[0] < 1
    watch._settle()
    assert len(waited) == 2


def test_a_full_disk_costs_no_evidence(watch, tmp_path, caplog):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    box = box_of(tmp_path, child.pid, process_end.began(os.getpid()))
    box._give_up()
    (tmp_path / "dumps").write_text("a file, in which nothing can be written")
    watch._make(child.pid)
    assert f"It stays in {box.path}" in caplog.text
    (tmp_path / "dumps").unlink()
    watch._make(child.pid)
    assert len(list((tmp_path / "dumps").iterdir())) == 1


@pytest.mark.parametrize(
    ("mode", "folder", "stays"),
    [("autopsy", None, False), ("keep", None, True), ("autopsy", "/crashes", True)],
)
def test_the_core_dump_of_one_that_was_aborted_is_read_and_goes(
    watch, tmp_path, monkeypatch, caplog, mode, folder, stays
):
    """NCCL's watchdog calls abort() before Python sees the CUDA error. The core dump is real."""
    environ = {}
    watch.context.settings = dataclasses.replace(watch.context.settings, core=mode)
    coredump.arm(environ, mode, tmp_path / "dumps")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    watch.start(SimpleNamespace(crash_dump_folder=folder))
    child = subprocess.Popen([sys.executable, "-c", "import os; os.abort()"])
    box = box_of(tmp_path, child.pid, process_end.began(os.getpid()))
    box._give_up()
    (tmp_path / "dumps").mkdir()
    named = environ[coredump.FILE].replace("%h", "host").replace("%t", "17")
    core = Path(named.replace("%p", str(child.pid)))
    core.write_bytes(real_cores.core("foreign"))
    child.wait()
    watch._make(child.pid)
    (dump,) = (tmp_path / "dumps").glob("*.pt")
    record = read(dump)
    assert record.autopsy is not None, caplog.text
    assert record.autopsy.kernel == "foreign_scatter"
    assert core.exists() == stays


def test_a_fork_has_a_lock_of_its_own(watch, monkeypatch):
    watch.lock.acquire()  # by the thread of the parent, which is not there in the child
    watch.pid = -1
    monkeypatch.setattr(watch, "_watch", lambda: None)
    monkeypatch.setattr(scheduler_watch.atexit, "register", lambda call: None)
    watch.start()
    assert not watch.lock.locked()


def test_a_box_that_somebody_else_holds_is_told(watch, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(scheduler_watch, "TRIES", 2)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    box = box_of(tmp_path, child.pid, process_end.began(os.getpid()))
    watch._make(child.pid)
    assert f"another process holds its black box {box.path}" in caplog.text
    fcntl.flock(box._fd, fcntl.LOCK_UN)
    watch._make(child.pid)
    assert len(list((tmp_path / "dumps").iterdir())) == 1
