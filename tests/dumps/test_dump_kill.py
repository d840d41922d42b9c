"""SIGKILL while a dump is written: the old file or a whole new one, never half of one."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from g4debug import cli
from g4debug.dumps import reading, writing

ROUNDS = 120
NAMES = ("g4debug-a-20260101T000000Z-1-1.pt", "g4debug-a-20260101T000000Z-1-2.pt")

# Imports torch once; then one forked writer per round, which is killed at a random moment.
WRITERS = """
import dataclasses, os, random, signal, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[4]]
from sample_trap import sample_record
from g4debug import dump
folder, rounds, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
names = sys.argv[5:]

def variant(letter):
    record = sample_record()
    rids = (letter * 32,) * 40_000  # some MiB: a write takes long enough to be hit
    return writing.encode(dataclasses.replace(
        record, steps=(dataclasses.replace(record.steps[0], rids=rids),)))

def atomic(data, name):
    writing.write(data, folder, name)

def naive(data, name):
    with open(folder / name, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())

data = [variant("a"), variant("b")]
folder.mkdir()
for name in names:
    atomic(data[0], name)
rng = random.Random(5)
for round in range(rounds):
    pid = os.fork()
    if pid == 0:
        n = 0
        while True:
            {"atomic": atomic, "naive": naive}[how](data[n % 2], names[n // 2 % len(names)])
            n += 1
    time.sleep(rng.uniform(0.001, 0.04))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    torn = [n for n in names if (folder / n).read_bytes() not in data]
    print("round", len(torn), flush=True)
"""


def kill_writers(folder: Path, how: str) -> list[int]:
    """Torn files after each round."""
    samples = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(folder), str(ROUNDS), how, samples, *NAMES],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines()]


def test_a_killed_writer_leaves_the_old_file_or_a_whole_new_one(tmp_path, capsys):
    folder = tmp_path / "dumps"
    assert kill_writers(folder, "atomic") == [0] * ROUNDS
    left = [p for p in folder.iterdir() if p.name not in NAMES]
    assert all(p.name.startswith(".g4debug-") and p.suffix == ".tmp" for p in left)
    assert len(left) > ROUNDS // 4  # so many were hit in the middle of a write
    for name in NAMES:
        assert reading.read(folder / name).steps[0].rids[0] in ("a" * 32, "b" * 32)
    assert cli.main(["list", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.count(".pt") >= len(NAMES)
    assert ".tmp" not in out
    assert "damaged" not in out
    for path in left[:5]:
        assert cli.main(["show", str(path)]) in (0, 2)  # asked for by name: no traceback
        assert "Traceback" not in "".join(capsys.readouterr())


def test_a_writer_without_the_rename_would_have_been_caught(tmp_path):
    assert sum(kill_writers(tmp_path / "dumps", "naive")) > ROUNDS // 10


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
def test_a_real_scheduler_is_killed_as_soon_as_it_writes(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "tracers" / "flight_recorder"))
    from test_flight_recorder_engine import LIMIT, engine

    folder = tmp_path / "dumps"
    folder.mkdir()
    faults = "seed=1;page-oob=1*corrupt(8)@mode=extend->4*corrupt(8)@mode=decode"
    environ = {"G4DEBUG_TRACE": "page-table,flight-recorder", "G4DEBUG_MODE": "contain"}
    with engine(tmp_path, G4DEBUG_FAULTS=faults, **environ) as run:
        run.wait_for("stand-ins for CUDA kernels in force", count=2)
        scheduler = run.scheduler()
        deadline = time.monotonic() + LIMIT
        while not os.listdir(folder):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        scheduler.send_signal(signal.SIGKILL)
        assert run.process.wait(LIMIT) != 0
    assert "RESULT" not in run.text
    left = os.listdir(folder)
    print(left)  # which of the two it was depends on the moment
    for name in left:
        if name.endswith(".pt"):
            assert reading.read(folder / name).finding.check == "page-table"
        else:
            assert name.startswith(".g4debug-")
            assert name.endswith(".tmp")
