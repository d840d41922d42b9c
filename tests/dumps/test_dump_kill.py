"""SIGKILL while a dump is written: the old file or a whole new one, never half of one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import installed_plugin
import pytest
import torch

from g4debug import cli
from g4debug.dumps import reading, writing

pytestmark = pytest.mark.once("writing a dump is g4debug's own code")

NAME = "g4debug-a-20260101T000000Z-1-1.pt"
WRITERS = Path(__file__).with_name("killed_writers.py")


def kill_writers(folder: Path, how: str, old: bool) -> list[tuple[str, str, str]]:
    """(step, file, temporary file) of each writer that was killed; see killed_writers.py."""
    done = subprocess.run(
        [sys.executable, str(WRITERS), str(folder), NAME, how, "old" if old else "none"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("how", "old"),
    [("atomic", True), ("atomic", False), ("created", False)],
    ids=["over-an-old-file", "into-no-directory", "never-over-a-file"],
)
def test_a_killed_writer_leaves_the_old_file_or_a_whole_new_one(tmp_path, capsys, how, old):
    """Killed before and after each call that a write makes to the system, one after the other."""
    killed = kill_writers(tmp_path, how, old)
    before = "old" if old else "none"
    assert [state for state, _ in itertools.groupby(k[1:] for k in killed)] == [
        (before, "none"),
        (before, "empty"),
        (before, "part"),
        (before, "whole"),
        *([("new", "whole")] if how == "created" else []),  # one file with two names
        ("new", "none"),
    ]
    steps = [step for step, _, _ in killed]
    assert steps.count("before write") > 2  # a large file is not written in one go
    assert killed[steps.index("after fsync")] == ("after fsync", before, "whole")
    assert steps.index("after fsync") < steps.index(
        "before link" if how == "created" else "before replace"
    )
    for number, (step, file, temporary) in enumerate(killed):
        folder = tmp_path / str(number)
        left = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
        stray = [name for name in left if name != NAME]
        assert (NAME in left, len(stray)) == (file != "none", temporary != "none"), step
        if NAME in left:
            letter = reading.read(folder / NAME).steps[0].rids[0][0]
            assert letter == {"old": "a", "new": "b"}[file]
        status = cli.main(["list", str(folder)])
        out, err = capsys.readouterr()
        assert status in (0, 2)
        assert (status == 0) or not folder.exists(), err
        assert out.count(".pt") >= (file != "none")
        assert ".tmp" not in out
        assert "damaged" not in out
        for name in stray:
            assert name.startswith(".g4debug-")
            assert name.endswith(".tmp")
            # Asked for by name: a whole one can be shown, and no other is a traceback.
            assert cli.main(["show", str(folder / name)]) == (0 if temporary == "whole" else 2)
            assert "Traceback" not in "".join(capsys.readouterr())


def test_a_writer_without_the_rename_would_have_been_caught(tmp_path):
    killed = kill_writers(tmp_path, "naive", old=True)
    files = [file for file, _ in itertools.groupby(file for _, file, _ in killed)]
    assert files == ["old", "empty", "part", "new"]


def test_what_killed_writers_left_is_removed_by_a_later_write(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    old = time.time() - 2 * writing.OLD_SECONDS
    keep = {
        f".g4debug-{os.getpid()}-abcd1234.tmp": old,  # of a living process
        f".g4debug-{gone.pid}-new_1234.tmp": time.time(),  # of a process in another container?
        ".g4debug-notes.tmp": old,  # not ours
        f"g4debug-{gone.pid}-abcd1234.tmp": old,
        "g4debug-page-table-20260101T000000Z-1-1.pt": old,
    }
    stale = {f".g4debug-{gone.pid}-abcd1234.tmp": old, f".g4debug-{1 << 40}-x.tmp": old}
    for name, when in {**keep, **stale}.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (when, when))
    writing.write(b"x", tmp_path, "g4debug-new.pt")
    assert {p.name for p in tmp_path.iterdir()} == {*keep, "g4debug-new.pt"}


def test_a_clean_up_that_fails_does_not_cost_the_dump(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(OSError("no")))
    assert writing.write(b"x", tmp_path, "g4debug-new.pt").read_bytes() == b"x"


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines")
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("before link", ".tmp"),
        pytest.param("after unlink", ".pt", marks=pytest.mark.long("one more")),
    ],
)
def test_a_real_scheduler_is_killed_while_it_writes(tmp_path, step, left):
    """It stops in its first dump where killed_writers.py, loaded as a plugin, makes it."""
    from watched_engine import LIMIT, engine

    installed_plugin.install(tmp_path, "killed_writers", "killed_writers:register")
    stopped = tmp_path / "stopped"
    environ = {
        "G4DEBUG_TRACE": "page-table,flight-recorder",
        "G4DEBUG_MODE": "contain",
        "G4DEBUG_FAULTS": "seed=1;page-oob=1*corrupt(8)@mode=extend->4*corrupt(8)@mode=decode",
        "PYTHONPATH": installed_plugin.path(tmp_path, WRITERS.parent),
        "STOP_WRITER": json.dumps([step, str(stopped)]),
    }
    with engine(tmp_path, **environ) as run:
        deadline = time.monotonic() + LIMIT
        while not stopped.exists():
            assert run.process.poll() is None, run.text[-3000:]
            assert time.monotonic() < deadline, run.text[-3000:]
            time.sleep(0.05)
        os.kill(int(stopped.read_text()), signal.SIGKILL)
        assert run.process.wait(LIMIT) != 0
    assert "RESULT" not in run.text
    names = os.listdir(tmp_path / "dumps")
    (name,) = (n for n in names if "flight-recorder" not in n)
    (killed,) = set(names) - {name}  # made of the black box, by the server's main process
    assert reading.read(tmp_path / "dumps" / killed).finding.kind == "killed"
    assert Path(name).suffix == left
    assert name.startswith("g4debug-" if left == ".pt" else ".g4debug-")
    assert reading.read(tmp_path / "dumps" / name).finding.check == "page-table"
