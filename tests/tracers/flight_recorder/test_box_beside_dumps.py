"""A black box in the folder of the dumps: it outlives its process, and the name of the folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import installed_plugin
import pytest

from g4debug import cli
from g4debug.dumps import patience, reading
from g4debug.findings import black_box, file_systems
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import boxing, scheduler_watch
from g4debug.tracers.flight_recorder.boxing import Boxing
from g4debug.tracers.flight_recorder.scheduler_watch import SchedulerWatch

SUPPORT = Path(installed_plugin.__file__).parent
CHILD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from black_boxes import step
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.boxing import Boxing
settings = Settings(debug_dir=Path(sys.argv[1]), black_box="dumps")
boxing = Boxing(Context.alone("flight-recorder", settings), SimpleNamespace(last=3, replays=0), str)
boxing.begin()
for n in range(1, 6):
    boxing.step(*step(n), 10**18)
print(boxing.box.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def shm(tmp_path, monkeypatch):
    """What stands for /dev/shm."""
    (folder := tmp_path / "shm").mkdir()
    monkeypatch.setattr(black_box.BlackBox.__init__, "__defaults__", (folder, False))
    monkeypatch.setattr(black_box.paths, "__defaults__", (folder,))
    return folder


def serving(dumps: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that keeps a box, and the box."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(dumps)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(SUPPORT), "PATH": "/usr/bin:/bin"},
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_it_outlives_its_process_and_its_dump_goes_where_it_lies(tmp_path, shm, capsys):
    """As of a container that is gone: /dev/shm is another one, and the volume has another name."""
    dumps, later = tmp_path / "dumps", tmp_path / "volume"
    child, box = serving(dumps)
    assert box.parent == dumps
    assert cli.main(["list", str(dumps)]) == 0
    assert box.exists()  # its process lives
    child.send_signal(signal.SIGKILL)
    child.wait()
    dumps.rename(later)
    assert list(shm.iterdir()) == []
    capsys.readouterr()
    assert cli.main(["list", str(later)]) == 0
    assert "gone" in capsys.readouterr().out
    (dump,) = later.iterdir()  # the box is no more
    record = reading.read(dump)
    assert (record.finding.check, record.finding.kind) == ("flight-recorder", "gone")
    assert [s.step for s in record.steps] == [1, 2, 3, 4, 5]
    assert not dumps.exists()


def alone(folder: Path, **settings: str) -> tuple[Boxing, Context]:
    context = Context.alone("flight-recorder", Settings(debug_dir=folder, **settings))
    return Boxing(context, SimpleNamespace(last=3, replays=0), lambda: ""), context


def limits(context: Context) -> str:
    return " ".join(f"{record.limits}" for record in context.recorder.status.records())


def test_without_being_asked_it_lies_in_memory(tmp_path, shm):
    made, context = alone(tmp_path / "dumps")
    made.begin()
    assert made.box.path.parent == shm
    assert not (tmp_path / "dumps").exists()
    made.remove()
    assert "dump folder" not in limits(context)


@pytest.mark.parametrize("kind", ["nfs4", "btrfs", ""])
def test_where_a_lock_or_its_space_may_not_hold_it_lies_in_memory(tmp_path, shm, monkeypatch, kind):
    """A box that another host takes for a dead process's would be a false finding."""
    monkeypatch.setattr(file_systems, "kind", lambda folder: kind)
    made, context = alone(tmp_path / "dumps", black_box="dumps")
    made.begin()
    assert made.box.path.parent == shm
    assert list((tmp_path / "dumps").iterdir()) == []
    assert f"lies on {kind or 'an unknown file system'}" in limits(context)
    made.remove()


def test_a_disk_that_hangs_gets_no_box_and_leaves_none(tmp_path, shm, monkeypatch):
    released, kind = threading.Event(), file_systems.kind
    monkeypatch.setattr(boxing, "DISK", 0.2)
    monkeypatch.setattr(
        file_systems, "kind", lambda folder: kind(folder) if released.wait(120) else ""
    )
    monkeypatch.setattr(file_systems, "HOLDING", (kind(tmp_path),))
    made, context = alone(tmp_path / "dumps", black_box="dumps")
    made.begin()
    assert made.box.path.parent == shm
    assert "has not answered" in limits(context)
    late = patience._hanging.pop(tmp_path / "dumps")
    released.set()
    late.join(60)
    assert list((tmp_path / "dumps").iterdir()) == []  # nobody would write to it
    made.remove()


def test_the_kind_of_a_file_system_is_that_of_the_systems_own_list(tmp_path):
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", "/proc", str(tmp_path)], capture_output=True, text=True
    )
    assert file_systems.kind(Path("/proc")) == "proc" == found.stdout.split()[0]
    own = file_systems.kind(tmp_path)
    assert own[:3] == found.stdout.split()[1][:3]  # "ext2/ext3", "overlayfs"
    with pytest.raises(OSError, match="No such file"):
        file_systems.kind(tmp_path / "none")


@pytest.mark.parametrize(("where", "makes"), [("dumps", True), ("shm", False)])
def test_the_servers_first_process_looks_there_if_it_was_asked(tmp_path, where, makes, monkeypatch):
    dumps = tmp_path / "dumps"
    child, box = serving(dumps)
    child.kill()
    child.wait()
    context = Context.alone("flight-recorder", Settings(debug_dir=dumps, black_box=where))
    watch = SchedulerWatch(context, SimpleNamespace())
    monkeypatch.setattr(scheduler_watch, "_is_of", lambda owner, server: True)
    begin = time.monotonic()
    watch._of(child.pid)
    assert time.monotonic() - begin < 60
    assert box.exists() != makes
    assert len(list(dumps.glob("*.pt"))) == makes
