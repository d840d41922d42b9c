"""A container that is stopped: its processes end all at once, and its mounts are gone with it.

What stands for the container is a shell with process ids and mounts of its own (``unshare``), in
which a process keeps a box. The shell is its first process, and is killed, as a container runtime
does it when the time to end is over; then the kernel kills whatever else is in there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import installed_plugin
import pytest

from g4debug import cli
from g4debug.dumps import reading
from g4debug.findings import black_box

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc")
AS_ROOT = ("--user", "--map-root-user")  # of a user namespace, where the tests are no root
SUPPORT = Path(installed_plugin.__file__).parent
STAYS, OWN = 'mount --bind "$SHM" /dev/shm', "mount -t tmpfs none /dev/shm"
# The container has the volume under a name of its own.
INSIDE = """
set -e
mount --bind "$VOLUME" "$NAME"
{shm}
"$PYTHON" -c "$CHILD" "$NAME" "$BOX" &
wait
"""
CHILD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from black_boxes import step
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder.boxing import Boxing
settings = Settings(debug_dir=Path(sys.argv[1]), black_box=sys.argv[2])
boxing = Boxing(Context.alone("flight-recorder", settings), SimpleNamespace(last=3, replays=0), str)
boxing.begin()
for n in range(1, 6):
    boxing.step(*step(n), 10**18)
print(boxing.box.path, flush=True)
time.sleep(600)
"""


def works(command: tuple[str, ...]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    tried = "mount -t tmpfs none /dev/shm"
    return subprocess.run([*command, "sh", "-c", tried], capture_output=True).returncode == 0


COMMAND = next((c for c in (UNSHARE, (*UNSHARE, *AS_ROOT)) if works(c)), ())
pytestmark = [
    pytest.mark.once("a box is kept without SGLang"),
    pytest.mark.skipif(not COMMAND, reason="this machine lets nobody make namespaces"),
]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The volume, its name in the container, and what stands for the host's /dev/shm."""
    found = [tmp_path / name for name in ("volume", "inside", "shm")]
    for folder in found:
        folder.mkdir()
    monkeypatch.setattr(black_box.paths, "__defaults__", (found[2],))
    return found


def stopped(folders: list[Path], shm: str, black_box: str) -> Path:
    """Start a container and stop it. Returns where its box was, by the container's names."""
    volume, name, host = folders
    variables = {
        "PYTHONPATH": os.pathsep.join(
            [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "VOLUME": str(volume),
        "NAME": str(name),
        "SHM": str(host),
        "PYTHON": sys.executable,
        "CHILD": CHILD,
        "BOX": black_box,
    }
    command = [*COMMAND, "sh", "-c", INSIDE.format(shm=shm)]
    runtime = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert runtime.stdout is not None
    path = Path(runtime.stdout.readline().strip())
    children = Path(f"/proc/{runtime.pid}/task/{runtime.pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)
    runtime.wait()  # the first process of a container ends behind all others of it
    runtime.stdout.close()
    assert path.name.startswith("g4debug-box-")
    return path


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["list", str(folder)]) == 0
    return capsys.readouterr().out


def check(dump: Path) -> None:
    record = reading.read(dump)
    assert (record.finding.check, record.finding.kind) == ("flight-recorder", "gone")
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5]


def test_a_box_in_a_folder_that_stays_is_made_into_a_dump(folders, capsys):
    volume, name, shm = folders
    path = stopped(folders, OWN, "dumps")
    assert path.parent == name
    assert list(name.iterdir()) == list(shm.iterdir()) == []
    assert "gone" in listed(volume, capsys)
    (dump,) = volume.iterdir()
    check(dump)


def test_a_box_in_a_dev_shm_that_stays_is_made_into_a_dump(folders, capsys):
    """The host's, or that of a pod. The dump goes to the folder that the container named."""
    _, name, shm = folders
    path = stopped(folders, STAYS, "shm")
    assert path.parent == Path("/dev/shm")
    assert [box.name for box in shm.iterdir()] == [path.name]
    assert "gone" in listed(name, capsys)
    assert list(shm.iterdir()) == []
    (dump,) = name.iterdir()
    check(dump)


def test_a_box_in_the_containers_own_dev_shm_is_lost(folders, capsys):
    """As docs/production.md says."""
    volume, _, shm = folders
    path = stopped(folders, OWN, "shm")
    assert path.parent == Path("/dev/shm")
    assert not path.exists()
    listed(volume, capsys)
    assert list(volume.iterdir()) == list(shm.iterdir()) == []
