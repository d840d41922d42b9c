"""The black box: records are read back, torn ones left out, and bytes from anybody bounded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from black_boxes import damaged, step

from g4debug.findings import black_box
from g4debug.findings.black_box import (
    BLOBS,
    EVENTS,
    NOTES,
    REQUESTS,
    STEPS,
    TOTAL_BYTES,
    BlackBox,
    BoxError,
    Owner,
)
from g4debug.findings.record import PageEvent, RequestEvent

OWNER = Owner(os.getpid(), 7, 8, 9, "node7", "auto-1", "/tmp/dumps")
SEEDS = 60


@pytest.fixture
def box(tmp_path):
    made = BlackBox(OWNER, tmp_path)
    yield made
    made.remove()


def read(box: BlackBox) -> black_box.Content:
    return black_box.content(box.path.read_bytes())


def test_the_last_of_a_small_folder_is_left_to_others(tmp_path, monkeypatch):
    """NCCL needs /dev/shm, too, and a container's may have 64 MiB."""
    free = (black_box.LEAVES + TOTAL_BYTES) // 4096 - 1
    small = SimpleNamespace(f_bavail=free, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(BoxError, match="MiB free"):
        BlackBox(OWNER, tmp_path)
    assert not list(tmp_path.iterdir())
    small.f_bavail += 1
    BlackBox(OWNER, tmp_path).remove()
    with pytest.raises(BoxError, match="No such file"):
        BlackBox(OWNER, tmp_path / "none")


def test_a_box_that_goes_while_they_are_listed_hides_no_other(box, tmp_path, monkeypatch):
    """Ranks end at the same time, and each removes its own."""
    gone = tmp_path / f"{black_box.PREFIX}gone"
    gone.touch()
    scandir = os.scandir

    @contextlib.contextmanager
    def racing(folder):
        with scandir(folder) as entries:
            found = list(entries)
        gone.unlink()
        yield found

    monkeypatch.setattr(os, "scandir", racing)
    assert black_box.paths(tmp_path) == [box.path]


def test_what_is_written_is_read_back(box):
    for n in range(1, 101):
        box.step(*step(n))
    box.returned(99)
    box.event(PageEvent(100, "extend", "full", (1, 2, 3), 20, "r", "x.py:1 f", "note", True))
    box.write("about", b"{}")
    box.write("about", b'{"a": 1}')
    box.left("/tmp/dump")
    found = read(box)
    assert (found.owner, found.returned, found.dump) == (OWNER, 99, "/tmp/dump")
    assert [s["step"] for s in found.steps] == list(range(101 - STEPS, 101))
    assert found.steps[-1] == {
        "step": 100,
        "forward_mode": "DECODE",
        "rids": ["a", "b"],
        "seq_lens": [10, 11],
        "spec_info": "Draft",
        "full_used": 50,
        "swa_used": 60,
        "time_ns": 10**18 + 100,
        "waiting": 2,
        "rows": [3, 4],
        "committed": [5, 6],
        "allocated": [7, 8],
        "evicted": [0, 1],
    }
    (event,) = found.events
    event["pages"] = tuple(event["pages"])
    assert PageEvent(**event) == PageEvent(
        100, "extend", "full", (1, 2, 3), 20, "r", "x.py:1 f", "note", True
    )
    assert found.blobs == {"about": b'{"a": 1}'}


def test_texts_of_megabytes_are_not_remembered(box):
    box.event(PageEvent(1, "extend", "full", (1,), 1, "r" * 10**6))
    assert not box._texts
    (event,) = read(box).events
    assert event["request"] == "r" * 40


def test_events_of_requests_are_read_back(box):
    def event(n):
        return RequestEvent(n, 10**18 + n, f"r{n}", "chunk", 64, 128, 300, 9, note="é" * 99)

    for n in range(1, NOTES + 4):
        box.note(tuple(vars(event(n)).values()))
    found = read(box)
    assert (len(found.notes), found.lost) == (NOTES, 3)
    last = dataclasses.replace(event(NOTES + 3), note="é" * 72)  # 144 bytes
    assert RequestEvent(**found.notes[-1]) == last


def test_a_step_after_a_dump_makes_it_count_no_more(box):
    box.step(*step(1))
    box.left("/tmp/dump")
    box.step(*step(2))
    assert read(box).dump == ""


def test_only_the_user_may_read_it(box):
    assert box.path.stat().st_mode & 0o777 == 0o600
    assert box.path.stat().st_size == TOTAL_BYTES
    assert box.path.stat().st_blocks * 512 >= TOTAL_BYTES  # reserved, or a full disk would kill


def test_what_sglang_does_not_say_is_not_known(box):
    box.step(*step(1, rows=[-1, 4], committed=[None, 6], allocated=[None, 8], evicted=[None, 1]))
    (found,) = read(box).steps
    assert (found["committed"], found["allocated"], found["evicted"]) == ([], [0, 8], [])


def test_a_large_batch_and_long_names_are_cut(box):
    n, rids = 700, [f"request-{i}" + "x" * 100 for i in range(700)]
    column = list(range(n))
    same = dict.fromkeys(("rows", "committed", "allocated", "evicted"), column)
    box.step(*step(1, rids, column, **same))
    box.step(*step(2, rids, [7, 8, 9], **same))  # SGLang does not say all lengths
    box.event(PageEvent(1, "k" * 99, "pool" * 9, tuple(range(8)), 9, "r" * 99, "é" * 99, "n" * 99))
    found = read(box)
    first, second = found.steps
    assert found.cut == n
    assert first["seq_lens"] == first["rows"] == second["rows"] == column[:REQUESTS]
    assert second["seq_lens"] == [7, 8, 9]
    assert len(first["rids"]) == len(first["rows"]) == len(first["evicted"]) == REQUESTS
    assert first["rids"][255].startswith("request-255")
    assert len(found.events[0]["pages"]) == 8


@pytest.mark.parametrize("rids", [("a\0b", "c"), ("\ud800", "c"), ("", "c"), ("\0", "")])
def test_an_id_of_any_text_is_no_other_request_s(box, rids):
    """A client may choose it."""
    box.step(*step(1, rids))
    (found,) = read(box).steps
    assert found["rids"] == [rids[0].replace("\0", "?").replace("\ud800", "?"), rids[1]]


def test_a_record_that_is_half_written_is_left_out(box):
    """A kill may come behind any byte. Each record is as it was, or is not there."""
    for n in range(1, STEPS + 6):
        box.step(*step(n, rids=(f"first-{n}", f"second-{n}")))
        box.write("status", b"%d" % n * 100)
    before = box.path.read_bytes()
    n = STEPS + 6
    box.step(*step(n, rids=(f"first-{n}", f"second-{n}")))
    box.write("status", b"%d" % n * 100)
    after = box.path.read_bytes()
    changed = [i for i in range(TOTAL_BYTES) if before[i] != after[i]]
    place = black_box._STEPS_AT + n % STEPS * black_box.STEP_BYTES
    # The order of the stores: the number becomes 0, then the rest, then the new number.
    torn = bytearray(before)
    torn[place : place + 8] = bytes(8)
    rng = random.Random(3)
    for _ in range(200):
        some = [i for i in changed if not place <= i < place + 8]
        cut = bytearray(torn)
        for i in rng.sample(some, rng.randrange(len(some))):
            cut[i] = after[i]
        found = black_box.content(bytes(cut))
        assert [s["step"] for s in found.steps] == list(range(7, n))
        assert all(s["rids"] == [f"first-{s['step']}", f"second-{s['step']}"] for s in found.steps)
        assert found.blobs["status"] in (b"%d" % (n - 1) * 100, b"%d" % n * 100)


def test_bytes_from_anybody_are_bounded(box):
    for n in range(1, STEPS + 1):
        box.step(*step(n))
        box.event(PageEvent(n, "free", "swa", (n,), 1))
    whole = box.path.read_bytes()
    rng = random.Random(1)
    for _ in range(SEEDS):
        begin = time.perf_counter()
        found = black_box.content(damaged(whole, rng))
        assert time.perf_counter() - begin < 5
        assert len(found.steps) <= STEPS
        assert len(found.events) <= EVENTS
        assert len(found.notes) <= NOTES
        assert all(len(s["rids"]) <= REQUESTS for s in found.steps)
        assert all(len(s["rows"]) <= REQUESTS for s in found.steps)
        assert all(len(blob) <= BLOBS[name] for name, blob in found.blobs.items())


@pytest.mark.parametrize("data", [b"", b"g4debug-box 2\n", b"\0" * TOTAL_BYTES, b"g4debug-box 9\n"])
def test_what_is_no_box_is_refused(data):
    with pytest.raises(BoxError, match="not a black box"):
        black_box.content(data)


def test_a_folder_without_room_is_told(tmp_path, monkeypatch):
    with pytest.raises(BoxError, match="cannot be made"):
        BlackBox(OWNER, tmp_path / "missing")

    def full(fd, at, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BoxError, match="No space left"):
        BlackBox(OWNER, tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- a folder that is full, or cannot be written ----------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, size: int, *options: str):
    """A tmpfs of so many bytes."""
    words = ",".join((f"size={size}", *options))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", words, "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


WHOLE = """
import os, sys
from pathlib import Path
from g4debug.findings.black_box import BLOBS, EVENTS, STEPS, BlackBox, Owner
from g4debug.findings.record import PageEvent
from black_boxes import step
folder = Path(sys.argv[1])
box = BlackBox(Owner(os.getpid(), 1, 2, 3, "h", "l", "/d"), folder)
with open(folder / "others", "wb", buffering=0) as file:
    try:
        while file.write(bytes(1 << 12)):
            pass
    except OSError as e:
        print(e.strerror)
for n in range(2 * STEPS):
    box.step(*step(n, [f"r{i}" * 9 for i in range(256)], range(256), **{
        name: list(range(256)) for name in ("rows", "committed", "allocated", "evicted")
    }))
for n in range(2 * EVENTS):
    box.event(PageEvent(n, "free", "full", (1, 2, 3), 3))
for _ in range(2):
    for name, size in BLOBS.items():
        box.write(name, bytes(size))
box.left("/d/dump")
print("whole")
"""


def test_a_file_system_that_gets_full_does_not_kill_the_scheduler(tmp_path):
    """A store into a page that a full tmpfs cannot give is SIGBUS: all of it is there before."""
    with mounted(tmp_path, black_box.LEAVES + TOTAL_BYTES + (1 << 16)):
        done = subprocess.run(
            [sys.executable, "-c", WHOLE, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.stdout.split("\n")[:2] == ["No space left on device", "whole"], done.stderr


def test_a_rank_that_another_one_takes_the_room_from_has_no_box(tmp_path, monkeypatch):
    """Both have seen that there is room."""
    with mounted(tmp_path, TOTAL_BYTES + (1 << 16)):
        room = SimpleNamespace(f_bavail=1 << 20, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: room)
        first = BlackBox(OWNER, tmp_path)
        with pytest.raises(BoxError, match="No space left on device"):
            BlackBox(OWNER, tmp_path)
        assert black_box.paths(tmp_path) == [first.path]
        first.step(*step(1))
        assert [s["step"] for s in read(first).steps] == [1]
        first.remove()


def test_a_folder_that_is_read_only_is_told(tmp_path):
    with (
        mounted(tmp_path, 1 << 26, "ro"),
        pytest.raises(BoxError, match="Read-only file system"),
    ):
        BlackBox(OWNER, tmp_path)


def test_a_limit_of_a_file_s_size_is_told(tmp_path):
    code = (
        "import os, resource, sys; from pathlib import Path; "
        "from g4debug.findings.black_box import BlackBox, BoxError, Owner\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: BlackBox(Owner(1, 2, 3, 4, 'h', 'l', '/d'), Path(sys.argv[1]))\n"
        "except BoxError as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert "File too large" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


# --- whose it is ----------------------------------------------------------------------------------

CHILD = """
import os, sys, time
from pathlib import Path
from g4debug.findings import step_bytes
from g4debug.findings.black_box import BlackBox, Owner
box = BlackBox(Owner(os.getpid(), 1, 2, 3, "h", "l", "/d"), Path(sys.argv[1]))
box.step(["r"], step_bytes.pack([], [], 1, [1], 2, 3, "DECODE", ""))
{body}
print("ready", flush=True)
time.sleep(600)
"""


def killed(folder: Path, body: str = "", kill: bool = True) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD.format(body=body), str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline().strip() == "ready"
    if kill:
        child.send_signal(signal.SIGKILL)
        child.wait()
    return child


def only(folder: Path) -> Path:
    (path,) = black_box.paths(folder)
    return path


def is_dead(path: Path) -> bool:
    with black_box.opened(path) as found:
        return found.dead


def test_a_box_of_a_living_process_is_left_alone(tmp_path):
    child = killed(tmp_path, kill=False)
    try:
        with black_box.opened(only(tmp_path)) as found:
            assert (found.owner.pid, found.dead) == (child.pid, False)
            assert found.read().steps[0]["step"] == 1  # it may be looked at meanwhile
    finally:
        child.kill()
        child.wait()
    with black_box.opened(only(tmp_path)) as found:
        assert found.dead
        with black_box.opened(found.path) as again:
            assert not again.dead  # one process at a time makes a dump of it
        found.remove()
        with black_box.opened(found.path) as again:
            assert again is None


def test_a_child_that_lives_on_does_not_keep_the_box_alive(tmp_path):
    body = "child = os.fork()\nif not child: box.step(['x'], b''); time.sleep(600)\nprint(child)"
    command = [sys.executable, "-c", CHILD.format(body=body), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    forked = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        end = time.monotonic() + 30
        while not is_dead(only(tmp_path)) and time.monotonic() < end:
            time.sleep(0.05)  # the child may not have come to give up the lock
        with black_box.opened(only(tmp_path)) as found:
            assert found.dead
            assert [s["step"] for s in found.read().steps] == [1]
    finally:
        os.kill(forked, signal.SIGKILL)


def test_other_files_are_no_boxes(tmp_path):
    name = tmp_path / black_box.PREFIX
    name.with_name(f"{name.name}short").write_bytes(black_box.MAGIC)
    name.with_name(f"{name.name}zero").write_bytes(b"\0" * TOTAL_BYTES)
    name.with_name(f"{name.name}folder").mkdir()
    name.with_name(f"{name.name}link").symlink_to("/dev/zero")
    os.mkfifo(name.with_name(f"{name.name}fifo"))
    found = black_box.paths(tmp_path)
    assert len(found) == 5
    for path in found:
        with black_box.opened(path) as box:
            assert box is None
    assert black_box.paths(tmp_path / "missing") == []
