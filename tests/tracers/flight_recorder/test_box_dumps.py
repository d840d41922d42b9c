"""Dumps that are made of black boxes: how the scheduler ended, and boxes from anybody."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from black_boxes import damaged, step

from g4debug.dumps import reading
from g4debug.dumps.errors import DumpError
from g4debug.findings import black_box, memory_map, process_end
from g4debug.findings.black_box import BoxError
from g4debug.findings.memory_map import GIVEN_BACK, KV, MemoryMap, MemoryRange
from g4debug.findings.process_end import End
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.flight_recorder import box_dumps, memory
from g4debug.tracers.flight_recorder.box_dumps import Maker
from g4debug.tracers.flight_recorder.boxing import Boxing

WHO = "the server's main process (pid 1)"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Boxes are made there, and dumps in its folder ``dumps``."""
    (tmp_path / "boxes").mkdir()
    monkeypatch.setattr(black_box.BlackBox.__init__, "__defaults__", (tmp_path / "boxes", False))
    monkeypatch.setattr(black_box.paths, "__defaults__", (tmp_path / "boxes",))
    return tmp_path


def left(folder: Path, steps: int = 5, returned: int = 4) -> Path:
    """The box of a process that has died. Its lock is given up as the system does it."""
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=3, replays=0), lambda: "")
    boxing.begin()
    for n in range(1, steps + 1):
        boxing.step(*step(n), 10**18)
    boxing.box.returned(returned)
    path = boxing.box.path
    boxing.box._give_up()
    return path


def made(path: Path, end: End, ended_ns: int = 10**18 + 10**9, **known):
    with black_box.opened(path) as box:
        assert box.dead
        found = box_dumps.make(box, Maker(WHO, end, ended_ns, **known))
    return None if found is None else reading.read(found[1])


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        (End(signal=9), "killed", "kill -9"),
        (End(signal=11), "native-crash", "Fatal Python error"),
        (End(signal=6), "native-crash", "abort()"),
        (End(signal=14), "native-crash", "kept the GIL"),
        (End(signal=10), "killed", "no fault in the code"),
        (End(signal=35), "killed", "no fault in the code"),
        (End(code=3), "gone", "called exit()"),
        (End(), "gone", "was taken by other code of the server"),
    ],
)
def test_the_end_decides_the_kind(folder, end, kind, words):
    path = left(folder)
    record = made(path, end)
    assert record.finding.kind == kind
    assert words in record.finding.cause
    assert record.finding.got.startswith(end.words)
    assert "step 5 began last, 1.0 s before, and had not returned" in record.finding.got
    assert len(record.steps) == 5
    assert record.created == "2001-09-09T01:46:41.000+00:00"
    assert record.finding.location.pid == os.getpid()
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_who_is_asked_to_end_leaves_nothing(folder, number):
    path = left(folder)
    assert made(path, End(signal=int(number))) is None
    assert not path.exists()


def test_a_dead_box_of_an_older_layout_is_removed_and_that_is_said(folder):
    path, newer, alive = left(folder), left(folder), left(folder)
    for box, magic in ((path, b"g4debug-box 1\n"), (newer, b"g4debug-box 3\n")):
        with box.open("r+b") as file:
            file.write(magic)
    with alive.open("r+b") as file:
        file.write(b"g4debug-box 1\n")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        problems = box_dumps.collect(folder / "other", "g4debug list")
    assert [found for found, _ in problems] == [path]
    assert "of an older g4debug" in problems[0][1]
    assert not path.exists()
    assert newer.exists()
    assert alive.exists()


def test_boxes_of_other_users_are_counted(folder, monkeypatch):
    left(folder)
    assert black_box.of_others() == 0
    monkeypatch.setattr(black_box.os, "geteuid", lambda: 4711)
    assert black_box.of_others() == 1


def asked(folder: Path, at: int, steps: int = 5) -> Path:
    """The box of a process that was asked to end at that time, and whose end nobody saw."""
    path = left(folder, steps)
    with path.open("r+b") as file:
        file.seek(black_box._ASKED_AT)
        file.write(black_box._MARK.pack(at))
    return path


def test_who_was_asked_to_end_together_with_the_server_leaves_nothing(folder):
    """A terminal is closed, or a signal goes to the whole group: nobody is left to see the end."""
    path = asked(folder, 10**18 + 5)
    assert made(path, End(), 0) is None
    assert not path.exists()
    assert made(asked(folder, 10**18, steps=0), End(), 0) is None


def test_who_goes_on_after_it_was_asked_or_is_seen_to_die_otherwise_leaves_a_dump(folder):
    assert made(asked(folder, 10**17), End(), 0).finding.kind == "gone"
    assert made(asked(folder, 0), End(), 0).finding.kind == "gone"
    assert made(asked(folder, -1), End(), 0).finding.kind == "gone"
    assert made(asked(folder, 10**18 + 5), End(signal=9)).finding.kind == "killed"


def test_a_process_that_left_a_dump_leaves_no_second_one(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    context.trap.left(folder / "dumps" / "own")
    path = boxing.box.path
    boxing.box._give_up()
    assert made(path, End(signal=9)) is None


def test_the_counters_of_the_oom_killer(folder, monkeypatch):
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"cgroup 5": 2, "host": 7})
    path, other = left(folder), left(folder)
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"cgroup 5": 3, "host": 8})
    record = made(path, End(signal=9))
    assert record.finding.kind == "oom-killed"
    assert "has killed 1 process of its cgroup" in record.finding.cause
    # A fault is no kill, and a kill of last week says nothing: the server has looked since.
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"cgroup 5": 2, "host": 7})
    fault, kill = left(folder), left(folder)
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"cgroup 5": 3, "host": 8})
    assert "OOM" not in made(fault, End(signal=11)).finding.cause
    record = made(kill, End(signal=9), oom_kills={"cgroup 5": 3, "host": 8})
    assert record.finding.kind == "killed"
    assert "OOM" not in record.finding.cause
    # Another container's counter says nothing, the host's only that it may be.
    monkeypatch.setattr(process_end, "oom_kills", lambda: {"cgroup 6": 90, "host": 9})
    record = made(other, End(signal=9))
    assert record.finding.kind == "killed"
    assert "has killed 2 processes of this host" in record.finding.cause


def test_what_has_no_room_goes_before_the_rest(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    describe = context.trap.describe
    many = {f"argument-{n}": "x" * 100 for n in range(3000)}
    context.trap.describe.memory = lambda: MemoryMap((MemoryRange(100, 50, KV),))
    context.trap.describe = lambda *args: dataclasses.replace(describe(*args), defaults=many)
    boxing.tell()
    boxing.step(*step(1), 10**18)
    path = boxing.box.path
    boxing.box._give_up()
    record = made(path, End(signal=9))
    assert record.defaults == {}
    assert record.memory is not None
    assert "has no memory map" not in str(context.status.record())
    assert record.versions
    assert len(record.steps) == 1


def test_a_box_has_room_for_the_largest_map_of_a_large_server(folder):
    """92 layers with a draft of its own, long names, and each share used up."""
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    many = [
        MemoryRange(
            (1 << 46) + n * (1 << 31), 1 << 30, what, name, "full", "target", 91, "K", "bfloat16",
            1 << 20, 64,
        )
        for what, name, count in (
            (KV, "k_buffer", 192),
            ("page table", "TRTLLMHAAttnBackend.decode_cuda_graph_metadata[160].page_table", 200),
            ("segment", "a CUDA graph's private pool and buffers and free", 5000),
            ("weights", "layers.91", 200),
        )
        for n in range(count)
    ]  # fmt: skip
    ranges = [dataclasses.replace(r, start=(1 << 46) + n * (1 << 31)) for n, r in enumerate(many)]
    found = memory_map.make(ranges, 123_456, "cuda:0", True)
    assert len(found.bare) == 2 * memory_map.MOST_BARE
    gone = [dataclasses.replace(r, what=GIVEN_BACK) for r in ranges[-memory.OLD :]]
    found = dataclasses.replace(found, ranges=(*found.ranges, *gone))
    context.trap.describe.memory = lambda: found
    boxing.begin()
    boxing.box._give_up()
    assert made(boxing.box.path, End(signal=9)).memory == found
    assert "has no memory map" not in str(context.status.record())


def test_a_box_without_room_for_the_memory_map_says_so(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    many = [MemoryRange(n * 100, 50, KV, "k_buffer", layer=n) for n in range(1, 2000)]
    context.trap.describe.memory = lambda: MemoryMap(tuple(many))
    boxing.begin()
    boxing.box._give_up()
    assert made(boxing.box.path, End(signal=9)).memory is None
    assert "has no memory map" in str(context.status.record())


def test_an_idle_server_makes_no_tape_for_its_box(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    asked = []
    for name in ("tape", "allocator_events"):
        setattr(context.trap.describe, name, lambda: asked.append(1) or ())
    boxing.begin()
    boxing.tell()
    assert boxing.box is not None
    assert not asked
    boxing.remove()


def test_a_box_that_cannot_be_begun_is_none(folder):
    """One without steps would say that the scheduler died before its first one."""
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: 1 / 0)
    boxing.begin()
    assert boxing.box is None
    assert not list((folder / "boxes").iterdir())
    assert "ZeroDivisionError" in str(context.status.record())


def test_a_server_without_room_for_a_box_goes_on_and_says_so(folder, monkeypatch, caplog):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    said = "a scheduler that is killed leaves no dump"
    (limit,) = context.status.record().limits
    assert limit.what == said
    assert "MiB free" in limit.why
    assert said in caplog.text
    for call in (boxing.tell, lambda: boxing.step(*step(1), 10**18), lambda: boxing.returned(None)):
        call()
    boxing.left(folder)
    boxing.remove()
    assert not list((folder / "boxes").iterdir())


def test_the_replays_are_those_of_the_steps_that_are_innocent(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    waited = SimpleNamespace(last=0, replays=0)
    boxing = Boxing(context, waited, lambda: "")
    boxing.begin()
    for n in range(1, 5):
        boxing._told_at = 0
        boxing.step(*step(n), 10**18)
        boxing.returned(None)
        waited.last = waited.replays = n
    status = json.loads(black_box.content(boxing.box.path.read_bytes()).blobs["status"])
    assert status["finished"] == status["replays"] == 2
    boxing.remove()


def test_the_checks_are_noted_behind_the_launch_while_the_device_works(folder, monkeypatch):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    noted = []
    monkeypatch.setattr(boxing, "_told", lambda: noted.append(boxing.box is not None))
    boxing.step(*step(1), 10**18)
    assert noted == []
    assert boxing.returned("a result") == "a result"
    boxing.returned("a result")  # a second has not passed
    assert noted == [True]
    boxing.remove()


def test_a_failure_to_note_them_ends_the_box_and_not_the_server(folder, monkeypatch):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    monkeypatch.setattr(boxing, "earlier", lambda: 1 // 0)
    boxing.step(*step(1), 10**18)
    assert boxing.returned("a result") == "a result"
    assert boxing.box is None
    assert "ZeroDivisionError" in context.status.record().limits[0].why


def test_a_clock_that_is_set_back_leaves_no_old_status(folder):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    waited = SimpleNamespace(last=0, replays=0)
    boxing = Boxing(context, waited, lambda: "")
    boxing.begin()
    for n in range(1, 5):
        boxing.step(*step(n), 10**18 - n * 3600 * 10**9)
        boxing.returned(None)
        waited.last = n
    status = json.loads(black_box.content(boxing.box.path.read_bytes()).blobs["status"])
    assert status["finished"] == 2
    boxing.remove()


def test_nobody_makes_it_while_the_server_could(folder, monkeypatch):
    path = left(folder)
    (folder / "dumps").mkdir()
    monkeypatch.setattr(process_end, "runs", lambda pid, since: True)
    assert box_dumps.collect(folder / "dumps", "g4debug list") == []
    assert path.exists()
    monkeypatch.undo()


def test_those_of_another_folder_stay_and_old_ones_go(folder):
    paths = [left(folder, steps=1) for _ in range(black_box.MOST + 3)]
    assert box_dumps.collect(folder / "elsewhere", "g4debug list") == []
    assert sum(path.exists() for path in paths) == black_box.MOST
    assert box_dumps.collect(folder / "elsewhere" / ".." / "dumps", "g4debug list") == []
    assert not any(path.exists() for path in paths)
    dumps = sorted((folder / "dumps").iterdir())
    assert len(dumps) == black_box.MOST
    record = reading.read(dumps[0])
    assert "nobody was left to see it" in record.finding.cause
    assert "by g4debug list" in record.finding.got
    assert record.created == "2001-09-09T01:46:40.000+00:00"  # of its last step


def test_a_folder_that_cannot_be_written_keeps_the_box(folder):
    path = left(folder)
    (folder / "dumps").write_text("a file")
    with pytest.raises(DumpError):
        made(path, End(signal=9))
    assert path.exists()
    ((where, why),) = box_dumps.collect(folder / "dumps", "g4debug list")
    assert where == path
    assert "cannot write" in why
    others = [left(folder, steps=1) for _ in range(black_box.MOST)]
    assert len(box_dumps.collect(folder / "dumps", "g4debug list")) == black_box.MOST + 1
    assert not path.exists()  # the oldest goes, so that /dev/shm does not fill up
    assert all(other.exists() for other in others)


def test_boxes_from_anybody_are_bounded(folder):
    """Each becomes a dump that can be read, or is refused in one line."""
    whole = left(folder).read_bytes()
    rng, refused = random.Random(2), 0
    for _ in range(40):
        content = black_box.content(damaged(whole, rng))
        begin = time.perf_counter()
        try:
            record = box_dumps.record_of(content, Maker(WHO, End(signal=9), 10**18))
            assert len(record.steps) <= black_box.STEPS
            box_dumps.fitted(record, box_dumps.MAX_MB)
        except (BoxError, DumpError) as e:
            refused += len(str(e).splitlines())
        assert time.perf_counter() - begin < 20
    assert refused < 40


@pytest.mark.parametrize(
    ("name", "blob"),
    [
        ("about", b"[1, 2]"),
        ("about", b"not json"),
        ("about", b"[" * 90_000),
        ("about", b'{"dump": 3}'),
        ("about", b'{"dump": {"versions": {"torch": 3}}}'),
        ("about", b'{"dump": {"unknown": 1}}'),
        ("about", b'{"location": {"pid": "x"}}'),
        ("about", b'{"dump": {"pools": [{"name": "full"}]}}'),
        ("about", b'{"backends": [1]}'),
        ("status", b'{"tracers": [{"name": 3}]}'),
        ("status", b'{"finished": "x", "tracers": [{"name": "page-table", "mode": "raise"}]}'),
        ("status", b'{"tracers": 3}'),
    ],
)
def test_values_of_another_type_are_refused(folder, name, blob):
    context = Context.alone("flight-recorder", Settings(debug_dir=folder / "dumps"))
    boxing = Boxing(context, SimpleNamespace(last=0, replays=0), lambda: "")
    boxing.begin()
    boxing.step(*step(1), 10**18)
    boxing.box.write(name, blob)
    content = black_box.content(boxing.box.path.read_bytes())
    with pytest.raises(BoxError, match="its content is damaged"):
        box_dumps.record_of(content, Maker(WHO, End(signal=9)))
    boxing.remove()
