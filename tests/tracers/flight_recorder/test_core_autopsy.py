"""CUDA core dumps are switched on, found, examined in another process, and removed."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from g4debug.dumps import patience
from g4debug.findings.record import Evidence
from g4debug.settings import Settings
from g4debug.tracers.flight_recorder import core_autopsy, coredump, tracer
from g4debug.tracers.flight_recorder.coredump import ENABLE, FILE, FLAGS, LIGHT, LIGHTWEIGHT
from g4debug.tracers.flight_recorder.tracer import FlightRecorder

SAYS = """
import json, pathlib, sys
core, dump = map(pathlib.Path, sys.argv[-2:])
assert core.read_bytes() == b"core"
dump.write_text("with autopsy")
print(json.dumps({"verdict": "V of layer 22, page 384 of 373", "kernel": "kernel_mha"}))
"""


@pytest.fixture
def says(monkeypatch, tmp_path):
    """Let a script stand for ``g4debug autopsy``; it gets the same arguments."""

    def put(code: str) -> None:
        script = tmp_path / "autopsy.py"
        script.write_text(code)
        monkeypatch.setattr(core_autopsy, "COMMAND", (sys.executable, str(script)))

    return put


def armed(tmp_path, mode="autopsy", **environ) -> dict[str, str]:
    coredump.arm(environ, mode, tmp_path)
    coredump.prepare(environ, tmp_path)
    return environ


def of(environ: dict[str, str], host: str = "host", pid: int = 77) -> Path:
    """The core dump that the driver writes of a process."""
    return Path(environ[FILE].replace("%h", host).replace("%p", str(pid)).replace("%t", "17"))


def test_it_is_switched_on_without_memory_and_goes_on(tmp_path):
    found = armed(tmp_path / "new")
    assert found[ENABLE] == "1"
    assert set(found[FLAGS].split(",")) == set(LIGHT.split(","))
    assert not coredump.ends_the_process(found)
    named = r"g4debug-core-%h-[0-9a-f]{8}-%p-%t\.nvcudmp"
    assert re.fullmatch(f"{re.escape(str(tmp_path / 'new'))}/{named}", found[FILE])
    assert (tmp_path / "new").is_dir()
    assert coredump.is_ours(found)


@pytest.mark.parametrize(
    ("version", "is_armed"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Oct 7", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", False),
        ("something else", False),
        (None, False),  # a device, and nobody says which driver
    ],
)
def test_a_driver_that_may_not_know_the_flags_is_told_nothing(
    tmp_path, monkeypatch, version, is_armed
):
    driver = tmp_path / "version"
    if version is not None:
        driver.write_text(version)
    monkeypatch.setattr(coredump, "DRIVER", driver)
    monkeypatch.setattr(coredump, "DEVICES", (tmp_path,))
    assert bool(armed(tmp_path / "dumps")) == is_armed
    assert bool(coredump.why_not(tmp_path)) != is_armed
    monkeypatch.setattr(coredump, "DEVICES", (tmp_path / "none",))
    if version is None:
        assert armed(tmp_path / "dumps")


@pytest.fixture
def old_driver(tmp_path, monkeypatch):
    (driver := tmp_path / "version").write_text("NVRM Kernel Module  535.183.01  Sun May 12")
    monkeypatch.setattr(coredump, "DRIVER", driver)


def test_an_old_driver_is_told_by_force_alone(tmp_path, old_driver, monkeypatch):
    for mode in ("autopsy", "keep"):
        assert armed(tmp_path, mode) == {}
    assert "G4DEBUG_CORE=force switches them on" in coredump.why_not(tmp_path)
    found = armed(tmp_path, "force")
    assert (found[ENABLE], found[FLAGS], found[LIGHTWEIGHT]) == ("1", LIGHT, "1")
    assert armed(tmp_path, "off", **found) == {}
    usage = coredump.shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(coredump.shutil, "disk_usage", lambda path: usage)
    assert armed(tmp_path, "force") == {}  # force is of the driver, and of nothing else


def test_where_the_driver_is_new_force_is_as_the_default(tmp_path):
    assert armed(tmp_path, "force") == armed(tmp_path)
    for mode, removes in (("autopsy", True), ("force", True), ("keep", False), ("off", False)):
        assert Settings(core=mode).removes_cores == removes


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("force", "were never run with one before 580, which may write all of the device's memory"),
        ("autopsy", "G4DEBUG_CORE=force switches them on all the same"),
        ("off", ""),
    ],
)
def test_what_an_old_driver_leaves_is_told_at_start(tmp_path, old_driver, monkeypatch, mode, said):
    limits: list[str] = []
    context = SimpleNamespace(
        settings=Settings(core=mode, debug_dir=tmp_path),
        limit=lambda what, why: limits.append(f"{what}: {why}"),
    )
    monkeypatch.setattr(os, "environ", armed(tmp_path, mode))
    FlightRecorder._tell_core_dumps(SimpleNamespace(context=context))
    assert len(limits) == bool(said)
    assert said in "".join(limits)


SGLANGS = LIGHT.removesuffix(",skip_abort")
BEHIND = "a CUDA error leaves no exception, and only the dump of the black box"
NONE = "a CUDA error leaves no CUDA core dump"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ()),
        ({ENABLE: "1", FLAGS: LIGHT}, ()),
        ({ENABLE: "0"}, ()),
        ({ENABLE: "1", FLAGS: SGLANGS}, (BEHIND, f"add skip_abort to {FLAGS} to have both")),
        ({ENABLE: "1"}, (BEHIND, "to have both; without flags it also writes all of the device's")),
        (
            {ENABLE: "1", FLAGS: SGLANGS, coredump.BY_SGLANG: "1"},
            (BEHIND, "SGLANG_CUDA_COREDUMP=1 tells the CUDA driver"),
        ),
        ({FILE: "/mine"}, (NONE, f"{FILE} was set before")),
        ({coredump.ASKED: "1"}, (NONE, f"{coredump.ASKED} was set before")),
        ({coredump.ASKED: "0"}, ()),
    ],
)
def test_what_the_users_own_variables_leave_is_told_at_start(tmp_path, monkeypatch, environ, said):
    limits: list[str] = []
    context = SimpleNamespace(
        settings=Settings(debug_dir=tmp_path),
        limit=lambda what, why: limits.append(f"{what}: {why}"),
    )
    monkeypatch.setattr(os, "environ", armed(tmp_path, **environ))
    FlightRecorder._tell_core_dumps(SimpleNamespace(context=context))
    assert len(limits) == bool(said)
    for words in said:
        assert words in limits[0]


def test_core_dumps_that_somebody_asks_for_by_a_pipe_stay_his(tmp_path):
    """They go to the same file, with the same flags. SGLang switches them on beside ours."""
    assert armed(tmp_path, **{coredump.ASKED: "1"}) == {coredump.ASKED: "1"}
    of_sglang = {**armed(tmp_path), coredump.ASKED: "1"}
    assert armed(tmp_path, **of_sglang) == of_sglang


def test_a_folder_that_cannot_be_looked_into_does_not_stop_the_server(tmp_path, monkeypatch):
    def refuses(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "exists", refuses)
    assert armed(tmp_path) == {}
    assert "Permission denied" in coredump.why_not(tmp_path)


def test_a_disk_that_hangs_does_not_keep_the_server_from_starting(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(coredump, "SECONDS", 0.2)
    usage = coredump.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        coredump.shutil, "disk_usage", lambda path: usage if released.wait(120) else None
    )
    begin = time.monotonic()
    assert armed(tmp_path) == {}
    assert "has not answered" in coredump.why_not(tmp_path)
    assert time.monotonic() - begin < 60
    released.set()


@pytest.mark.parametrize("name", [ENABLE, FLAGS, FILE, LIGHTWEIGHT])
def test_what_somebody_has_set_stays(tmp_path, name):
    assert armed(tmp_path, **{name: "mine"}) == {name: "mine"}


def test_a_server_that_a_server_starts_has_its_own_folder(tmp_path):
    found = armed(tmp_path)
    assert armed(tmp_path / "inner", **found)[FILE].startswith(str(tmp_path / "inner"))
    assert armed(tmp_path, "off", **found) == {}


@pytest.mark.parametrize(
    ("folder", "free", "why"),
    [("a%d", 1 << 40, "would replace the %"), ("full", 1 << 30, "MiB free"), ("file/x", 1, "file")],
)
def test_where_none_can_be_written_none_is_asked_for(tmp_path, monkeypatch, folder, free, why):
    (tmp_path / "file").write_text("")
    usage = coredump.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(coredump.shutil, "disk_usage", lambda path: usage)
    assert armed(tmp_path / folder) == {}
    assert why in coredump.why_not(tmp_path / folder)


def test_a_folder_that_a_stranger_has_made_in_tmp_gets_none(tmp_path, monkeypatch):
    """The driver follows a link there, and would write over a file of this user."""
    (dumps := tmp_path / "tmp" / "dumps").mkdir(parents=True)
    (tmp_path / "tmp").chmod(0o1777)
    assert coredump.why_not(dumps) == ""
    lstat = os.lstat

    def of_stranger(path):
        return SimpleNamespace(st_uid=os.geteuid() + 1) if path == dumps else lstat(path)

    monkeypatch.setattr(coredump.os, "lstat", of_stranger)
    assert "another user" in coredump.why_not(dumps / "inner")
    assert armed(dumps) == {}
    (tmp_path / "tmp").chmod(0o700)  # nobody but this user has put that there
    assert coredump.why_not(dumps) == ""


def many(folder: Path, age: float) -> list[Path]:
    """Four core dumps of ours more than are kept, so many seconds old, the oldest first."""
    cores = [folder / f"g4debug-core-h-{n}-1.nvcudmp" for n in range(coredump.MOST + 4)]
    for n, core in enumerate(cores):
        core.write_text("core")
        os.utime(core, (0, time.time() - age + n / 1000))
    return cores


def test_few_are_kept(tmp_path, monkeypatch):
    found = armed(tmp_path)
    (tmp_path / "core.of.others").write_text("core")
    (tmp_path / "g4debug-core-link.nvcudmp").symlink_to("core.of.others")
    cores = many(tmp_path, coredump.NEW + 60)
    coredump.prepare({FILE: "mine"}, tmp_path)
    assert all(core.exists() for core in cores)  # these are not of this server's making
    coredump.prepare(found, tmp_path)
    assert [core.exists() for core in cores] == [False] * 4 + [True] * coredump.MOST
    assert (tmp_path / "core.of.others").exists()
    assert (tmp_path / "g4debug-core-link.nvcudmp").is_symlink()
    cores, me = many(tmp_path, coredump.NEW + 60), os.geteuid()
    monkeypatch.setattr(coredump.os, "geteuid", lambda: me + 1)
    coredump.prepare(found, tmp_path)
    assert all(core.exists() for core in cores)  # nor these, of another user


def test_those_of_the_same_crash_stay_for_the_ranks_that_read_them(tmp_path):
    found = armed(tmp_path)
    cores = many(tmp_path, coredump.NEW / 4)
    coredump.prepare(found, tmp_path)
    assert all(core.exists() for core in cores)


def test_older_ones_go_after_a_crash_too(tmp_path, says):
    says(SAYS)
    environ = armed(tmp_path)
    cores = many(tmp_path, coredump.NEW + 60)
    of(environ).write_bytes(b"core")
    run(tmp_path, environ, remove=False)
    assert [core.exists() for core in cores] == [False] * 5 + [True] * (coredump.MOST - 1)
    assert of(environ).exists()


@pytest.mark.parametrize("ours", [True, False])
def test_one_that_is_too_large_is_removed_while_it_is_written(
    tmp_path, says, monkeypatch, caplog, ours
):
    """The driver holds it open, and writes on."""
    says(SAYS)
    monkeypatch.setattr(coredump, "LARGEST", 1 << 20)
    environ = armed(tmp_path) if ours else {ENABLE: "1", FILE: str(tmp_path / "mine.%p")}
    core, ended = of(environ), threading.Event()
    file = core.open("wb", buffering=0)
    file.write(b"core")

    def write():
        for _ in range(10_000):
            file.write(bytes(100_000))
            if ended.wait(0.02):
                return

    writer = threading.Thread(target=write)
    monkeypatch.setattr(core_autopsy, "WRITTEN", 5 if not ours else 300)
    monkeypatch.setattr(core_autopsy, "LIMIT", 300)
    writer.start()
    begin = time.monotonic()
    try:
        run(tmp_path, environ, remove=False)
    finally:
        ended.set()
        writer.join()
    assert core.exists() != ours
    assert not (tmp_path / "dump").exists()
    if ours:
        assert "MiB, and at most 1 are expected" in caplog.text
        assert "it was removed" in caplog.text
        assert time.monotonic() - begin < 200
        # What was written before is given back, though the file is still open: it was emptied.
        assert os.fstat(file.fileno()).st_blocks * 512 < coredump.LARGEST
    file.close()


def test_what_only_looks_like_ours_is_not_removed(tmp_path):
    environ = armed(tmp_path)
    (other := tmp_path / "other").write_text("mine")
    of(environ).symlink_to(other)
    for core in (of(environ), other):
        coredump.remove(environ, core, 60, grows=True)
        assert core.exists()
    assert other.read_text() == "mine"


def test_ranks_that_remove_the_same_old_ones_do_not_disturb_each_other(tmp_path, monkeypatch):
    """Another rank has just removed the first of them."""
    found = armed(tmp_path)
    many(tmp_path, coredump.NEW + 60)
    unlink, gone = Path.unlink, []

    def first(path, missing_ok=False):
        if not gone:
            gone.append(path)
            unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", first)
    coredump.prepare(found, tmp_path)
    assert gone
    assert len(list(tmp_path.glob("g4debug-core-*"))) == coredump.MOST


def run(tmp_path, environ, **how) -> None:
    how = {"wait": True, "remove": True, **how}
    core_autopsy.put_into(tmp_path / "dump", environ, 77, 0, **how)


@pytest.mark.parametrize("remove", [True, False])
def test_its_result_is_put_into_the_dump(tmp_path, says, caplog, remove):
    says(SAYS)
    environ = armed(tmp_path)
    core = of(environ)
    writer = threading.Thread(target=lambda: (time.sleep(0.5), core.write_bytes(b"core")))
    writer.start()  # it is waited for
    run(tmp_path, environ, remove=remove)
    writer.join()
    assert (tmp_path / "dump").read_text() == "with autopsy"
    assert "the CUDA core dump says: V of layer 22, page 384 of 373; kernel_mha\n" in caplog.text
    assert core.exists() != remove


def test_the_users_own_core_dump_stays(tmp_path, says):
    says(SAYS)
    core = tmp_path / "mine.77"
    core.write_bytes(b"core")
    run(tmp_path, {ENABLE: "1", FILE: str(tmp_path / "mine.%p")}, wait=False)
    assert (tmp_path / "dump").exists()
    assert core.exists()


def test_a_core_dump_of_another_host_with_the_same_process_id_is_not_taken(tmp_path, monkeypatch):
    """Two replicas with one dump folder: the neighbour has a core dump, and this one has none."""
    own, uname = armed(tmp_path), coredump.os.uname()
    monkeypatch.setattr(
        coredump.os, "uname", lambda: type(uname)(("Linux", "neighbour", "", "", ""))
    )
    other = armed(tmp_path)
    monkeypatch.undo()
    of(other, "neighbour").write_bytes(b"core")
    assert coredump.find(own, 77, 0) is None
    assert coredump.find(other, 77, 0) == of(other, "neighbour")
    # Containers of one host may have its name.
    of(own, "neighbour").write_bytes(b"core")
    assert coredump.find(own, 77, 0) == of(own, "neighbour")
    assert coredump.find(own, 78, 0) is None


@pytest.mark.parametrize("name", ["core_%h_%p", None])
def test_a_name_of_the_users_must_have_this_host(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    environ = {ENABLE: "1"} | ({FILE: name} if name else {})
    named = name or coredump.UNNAMED
    host = coredump.os.uname().nodename
    of({FILE: named}, "neighbour").write_bytes(b"core")
    assert coredump.find(environ, 77, 0) is None
    for own in (host, f"{host}.example.com"):
        core = of({FILE: named}, own)
        core.write_bytes(b"core")
        assert coredump.find(environ, 77, 0) == tmp_path / core
        core.unlink()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time; time.sleep(600)", "it took more than 1 s"),
        ("import sys; sys.exit('error: unknown layout')", "exit code 1: error: unknown layout"),
        ("print('no json')", "did not print JSON"),
        ("print(json := '[1]')", "did not print JSON"),
        ("import os; os.abort()", "exit code -6"),
    ],
)
def test_without_an_autopsy_everything_stays(tmp_path, says, monkeypatch, caplog, code, why):
    says(code)
    monkeypatch.setattr(core_autopsy, "SECONDS", 1.0)
    environ = armed(tmp_path)
    core = of(environ)
    core.write_bytes(b"core")
    (tmp_path / "dump").write_text("as it was")
    run(tmp_path, environ)
    assert why in caplog.text
    assert core.exists()
    assert (tmp_path / "dump").read_text() == "as it was"


SLOWLY = """
import sys, time
time.sleep(float(sys.argv[1]))
sys.exit("g4debug: it is cut off")
"""


@pytest.mark.parametrize(
    ("each", "why"), [(600, "it took more than"), (0.5, "had not written all of it")]
)
def test_all_of_it_has_one_limit(tmp_path, says, monkeypatch, caplog, each, why):
    """A core dump that appears, is half of one, and is read again and again, each time slowly."""
    says(SLOWLY)
    monkeypatch.setattr(core_autopsy, "COMMAND", (*core_autopsy.COMMAND, str(each)))
    for name, seconds in (("SECONDS", 600), ("WRITTEN", 600), ("APPEARS", 600), ("LIMIT", 4)):
        monkeypatch.setattr(core_autopsy, name, seconds)
    environ = armed(tmp_path)
    of(environ).write_bytes(b"co")
    begin = time.monotonic()
    run(tmp_path, environ)
    assert time.monotonic() - begin < 60
    assert why in caplog.text
    assert f"Later, run: g4debug autopsy --write {of(environ)} {tmp_path / 'dump'}" in caplog.text
    of(environ).unlink()
    run(tmp_path, environ)
    assert time.monotonic() - begin < 90
    assert "no CUDA core dump began to appear" in caplog.text


def test_the_limit_counts_from_the_error(tmp_path, says, monkeypatch, caplog):
    """Writing the dump had taken all of it."""
    says(SAYS)
    environ = armed(tmp_path)
    of(environ).write_bytes(b"core")
    run(tmp_path, environ, began=time.monotonic() - core_autopsy.LIMIT)
    assert "no autopsy of CORE: the time behind the error is over. Later, run:" in caplog.text
    assert not (tmp_path / "dump").exists()
    assert core_autopsy.LIMIT == 30  # what the documentation says
    assert core_autopsy.APPEARS + core_autopsy.WRITTEN + core_autopsy.DISK < core_autopsy.LIMIT


HALVES = """
import pathlib, sys
core, dump = map(pathlib.Path, sys.argv[-2:])
if core.read_bytes() != b"core":
    sys.exit(f"g4debug: {core}: it is cut off: its section table is missing")
"""


@pytest.mark.parametrize("finishes", [True, False])
def test_a_core_dump_that_is_still_written_is_read_again(
    tmp_path, says, monkeypatch, caplog, finishes
):
    """The disk has stopped for a moment, and goes on once somebody has read the first half."""
    says(HALVES + SAYS)
    environ, refused = armed(tmp_path), []
    core, read = of(environ), core_autopsy.autopsy
    core.write_bytes(b"co")

    def autopsy(*args):
        found = read(*args)
        refused.append(found[1])
        if finishes:
            core.write_bytes(b"core")
        return found

    monkeypatch.setattr(core_autopsy, "autopsy", autopsy)
    monkeypatch.setattr(core_autopsy, "WRITTEN", 600 if finishes else 3)
    monkeypatch.setattr(core_autopsy, "LIMIT", 600)
    run(tmp_path, environ)
    assert "it is cut off" in refused[0]
    assert (tmp_path / "dump").exists() == finishes
    assert core.exists() != finishes
    assert len(refused) >= 2
    later = f"g4debug autopsy --write {core} {tmp_path / 'dump'}"
    assert (later in caplog.text) != finishes


def test_a_size_must_stand(tmp_path, monkeypatch):
    """A file that grows at each look is not whole, and one that has stopped for long enough is."""
    environ, now = armed(tmp_path), [0.0]
    core = of(environ)

    def sleep(seconds):
        now[0] += seconds
        if now[0] < 3 and round(now[0] * 10) % 4 == 0:
            with core.open("ab") as file:
                file.write(b"x")

    monkeypatch.setattr(core_autopsy.time, "sleep", sleep)
    monkeypatch.setattr(core_autopsy.time, "monotonic", lambda: now[0])
    core.write_bytes(b"x")
    assert core_autopsy.whole(environ, 77, 0, 8.0) == core
    assert now[0] > 3


def test_a_disk_that_hangs_does_not_keep_a_scheduler_that_dies(tmp_path, monkeypatch, caplog):
    released, environ = threading.Event(), armed(tmp_path)
    monkeypatch.setattr(patience, "SECONDS", 0.2)
    for name, seconds in (("APPEARS", 0.1), ("WRITTEN", 0.1), ("DISK", 0.1)):
        monkeypatch.setattr(core_autopsy, name, seconds)
    monkeypatch.setattr(coredump.glob, "glob", lambda pattern: [] if released.wait(120) else None)
    begin = time.monotonic()
    try:
        assert "not looked for" in coredump.core_dump(environ, 77, 0)
        run(tmp_path, environ)
        patience._hanging.clear()
        run(tmp_path, environ)
    finally:
        released.set()
    assert time.monotonic() - begin < 60
    assert "still has not answered" in caplog.text
    assert "has not answered in" in caplog.text


def test_an_autopsy_that_cannot_be_killed_is_left_behind(tmp_path, says, monkeypatch):
    """One that waits for a disk in the kernel ends with the disk. Here it is not killed at all."""
    says("import time; time.sleep(600)")
    left = []

    def kill(process):
        left.append(process)

    monkeypatch.setattr(core_autopsy.subprocess.Popen, "kill", kill)
    begin = time.monotonic()
    try:
        _, problem = core_autopsy.autopsy(tmp_path / "core", tmp_path / "dump", 1.0)
    finally:
        monkeypatch.undo()
        for process in left:
            process.kill()
            process.wait()
    assert problem == "it took more than 1 s"
    assert time.monotonic() - begin < 300


def test_where_there_is_none_nobody_waits_for_long(tmp_path, monkeypatch, caplog):
    begin = time.monotonic()
    monkeypatch.setattr(core_autopsy, "APPEARS", 60)
    run(tmp_path, armed(tmp_path), wait=False)
    monkeypatch.setattr(core_autopsy, "WRITTEN", 0.5)
    monkeypatch.setattr(core_autopsy, "APPEARS", 0.3)
    assert caplog.text == ""
    run(tmp_path, armed(tmp_path))
    assert "no CUDA core dump began to appear" in caplog.text
    core = of(armed(tmp_path))
    core.write_text("")  # it is never written
    run(tmp_path, armed(tmp_path))
    assert time.monotonic() - begin < 60
    assert f"no autopsy of {core}: the driver had not written all of it" in caplog.text
    assert f"g4debug autopsy --write {core} {tmp_path / 'dump'}" in caplog.text


def test_a_scheduler_that_dies_counts_from_its_error_not_from_its_dump(tmp_path, monkeypatch):
    """The dump is written in between, to a disk that may be slow."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    began: list[float] = []
    monkeypatch.setattr(os, "environ", {ENABLE: "1"})
    monkeypatch.setattr(core_autopsy, "put_into", lambda *args, **how: began.append(how["began"]))

    def report_end(found, evidence):
        time.sleep(1)
        return tmp_path / "dump"

    trap = SimpleNamespace(report_end=report_end, stop=lambda found, path: None)
    context = SimpleNamespace(settings=Settings(), trap=trap)
    died = SimpleNamespace(
        context=context,
        others=SimpleNamespace(first=lambda: None, ending=False),
        recorder=SimpleNamespace(scheduler=None),
        armed_at=0.0,
        complete=None,
        _asserted=lambda error: None,
        _lookups=lambda found: (),
        _of_cuda=lambda error: Evidence(),
        _innocence=None,
        _removes_core=lambda: True,
    )
    died._look_into_core = lambda *args: FlightRecorder._look_into_core(died, *args)
    monkeypatch.setattr(tracer.finding, "of_exception", lambda *args: None)
    begin = time.monotonic()
    try:
        raise error
    except RuntimeError:
        FlightRecorder._on_exception(died, "scheduler.run_event_loop")
    assert 0 <= began[0] - begin < 1
