"""Real schedulers that are killed at each point: each leaves one dump, and a healthy end none."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import installed_plugin
import pytest
from real_engine import ENGINE, Run, WhenAsked, boxes, drive, dumps_in, started

from g4debug import cli
from g4debug.findings import black_box

HERE = Path(__file__).parent
pytestmark = ENGINE
KILL, SEGV, ABRT = (str(int(n)) for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT))
ALL = {"SGLANG_TRTLLM_MHA_DEBUG": "1", "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1"}


def plugin(folder: Path, at: str, by: str) -> dict[str, str]:
    """The environment in which a scheduler ends itself."""
    installed_plugin.install(folder / "site", "killing", "killing:register")
    return {
        "PYTHONPATH": installed_plugin.path(folder / "site", HERE),
        "KILL_AT": at,
        "KILL_BY": by,
        "G4DEBUG_TRACE": "flight-recorder",
    }


def killed(
    folder: Path, at: str, by: str, *arguments: str, cold: bool = False, **environ: str
) -> Run:
    environ = {**plugin(folder, at, by), **environ}
    arguments = arguments or ("mtp", "1", "1")
    return drive(
        folder, str(HERE / "drive_killed.py"), *arguments, cold=cold, keep_boxes=True, **environ
    )


LONG = pytest.mark.long("an engine for each end")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    found = WhenAsked(
        forward=lambda: killed(folder / "forward", "forward", KILL, **ALL, G4DEBUG_TRACE=""),
        start=lambda: killed(folder / "start", "start", SEGV),
        idle=lambda: killed(folder / "idle", "idle", ABRT, "mtp", "1", "1", "wait", KILL_STEP="8"),
        write=lambda: killed(folder / "write", "write", KILL, "plain", "1", "0"),
        exit=lambda: killed(folder / "exit", "forward", "exit", "plain", "1", "1"),
        asked=lambda: killed(folder / "asked", "forward", str(int(signal.SIGTERM))),
        healthy=lambda: killed(folder / "healthy", "never", KILL),
    )
    return folder, found


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("forward", "killed", "the scheduler was killed (SIGKILL)"),
        pytest.param(
            "start",
            "native-crash",
            "the scheduler died of signal 11 (SIGSEGV), outside of Python",
            marks=LONG,
        ),
        pytest.param(
            "idle",
            "native-crash",
            "the scheduler died of signal 6 (SIGABRT), outside of Python",
            marks=LONG,
        ),
        pytest.param("write", "killed", "the scheduler was killed (SIGKILL)", marks=LONG),
        pytest.param(
            "exit",
            "gone",
            "the scheduler ended with exit code 3, and no exception was seen",
            marks=LONG,
        ),
    ],
)
def test_a_killed_scheduler_leaves_one_dump(runs, name, kind, words):
    folder, found = runs
    run = found[name]
    (record,) = run.dumps
    f = record.finding
    assert (f.check, f.kind) == ("flight-recorder", kind), f.headline
    assert f.headline.endswith(words)
    assert f.headline in run.log  # so that whoever reads only the log has it
    assert f.got.count("black box") == 1
    assert "by the server's main process (pid " in f.got
    pid = int(re.search(r"THE SCHEDULER (\d+) ENDS", run.log)[1])
    assert f.location.pid == pid
    assert (f.location.rank, f.location.dp_rank) == (0, 0)
    assert record.arguments["attention_backend"] == "trtllm_mha"
    assert "sglang" in record.versions
    assert [t.mode for t in record.tracers if t.name == "flight-recorder"] == ["raise"]
    assert boxes(folder / name) == []


@pytest.mark.parametrize(
    "name", ["forward", *(pytest.param(n, marks=LONG) for n in ("idle", "write", "exit"))]
)
def test_the_last_steps_are_there(runs, name):
    (record,) = runs[1][name].dumps
    steps = [s.step for s in record.steps]
    # Of the step that is half written when the scheduler dies, nothing is told.
    last = {"idle": steps[-1], "write": 4}.get(name, 5)
    assert steps == list(range(1, last + 1)), name
    assert record.finding.location.step == last
    for s in record.steps:
        assert len(s.rids) == len(s.rows) == len(s.allocated) > 0
        assert all(s.rids)
    returned = "had returned" if name in ("idle", "write") else "had not returned"
    assert returned in record.finding.got


@LONG
def test_before_the_first_step_there_are_none(runs):
    (record,) = runs[1]["start"].dumps
    assert record.steps == ()
    assert "start-up" in record.finding.headline


def test_it_has_the_allocators_events_and_what_was_checked(runs):
    (record,) = runs[1]["forward"].dumps
    assert {e.pool for e in record.allocator} == {"full", "swa"}
    assert all(e.caller for e in record.allocator if e.kind != "clear")
    assert "page-table" in {t.name for t in record.tracers}
    assert "Checked" in record.finding.cause or "innocent" in record.finding.cause


def test_the_driver_was_told_to_write_core_dumps(runs):
    (record,) = runs[1]["forward"].dumps
    assert record.environment["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert record.environment["CUDA_COREDUMP_GENERATION_FLAGS"].endswith(",skip_abort")
    named = record.environment["CUDA_COREDUMP_FILE"]
    assert re.search(r"/dumps/g4debug-core-%h-[0-9a-f]{8}-%p-%t\.nvcudmp$", named)


@pytest.mark.long("an engine for each way to ask for core dumps")
@pytest.mark.parametrize(
    ("environ", "flags", "named"),
    [
        ({"SGLANG_CUDA_COREDUMP": "1"}, "skip_constbank_memory", "/cuda_coredump_%h.%p.%t"),
        ({"CUDA_COREDUMP_FILE": "/tmp/mine"}, None, "/mine"),
        ({"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}, None, None),
        ({"G4DEBUG_CORE": "off"}, None, None),
        ({"G4DEBUG_CORE": "keep"}, "skip_abort", "-%p-%t.nvcudmp"),
    ],
)
def test_what_the_user_or_sglang_has_set_stays(tmp_path, environ, flags, named):
    """SGLang's own switch sets no skip_abort: the driver then aborts, and the black box is left."""
    cores = {"SGLANG_CUDA_COREDUMP_DIR": str(tmp_path / "cores")}
    # Cold: SGLang sets its variables when it is imported.
    run = killed(
        tmp_path, "start", ABRT, cold="SGLANG_CUDA_COREDUMP" in environ, **cores, **environ
    )
    (record,) = run.dumps
    found = record.environment
    assert found.get("CUDA_COREDUMP_GENERATION_FLAGS", "x").split(",")[-1] == (flags or "x")
    assert found.get("CUDA_COREDUMP_FILE", "").endswith(named or "")
    assert ("CUDA_COREDUMP_FILE" in found) == bool(named)


def test_no_prompt_and_no_token_is_in_a_box(runs):
    for record in runs[1]["forward"].dumps:
        assert record.tape is None


@pytest.mark.parametrize("name", ["asked", "healthy"])
def test_who_is_asked_to_end_or_ends_well_leaves_nothing(runs, name):
    folder, found = runs
    assert found[name].dumps == []
    assert boxes(folder / name) == []
    assert "black box" not in found[name].log


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long("the same with another signal")),
    ],
)
def test_a_server_whose_whole_group_is_asked_to_end_leaves_nothing(tmp_path, capsys, number):
    """A terminal is closed, or somebody ends a script's group. The main process dies, too: here it
    is stopped meanwhile, because it sees how its scheduler ends if it is the slower one, and the
    system kills the scheduler behind it if it is the faster one."""
    how = plugin(tmp_path, "never", KILL)
    command = (str(HERE / "drive_killed.py"), "mtp", "1", "1", "wait")
    with started(tmp_path, *command, keep_boxes=True, **how) as (process, log):
        end = time.monotonic() + 300
        while "SERVED" not in log.read_text(errors="replace") and time.monotonic() < end:
            time.sleep(0.2)
        (path,) = boxes(tmp_path)
        os.kill(process.pid, signal.SIGSTOP)
        while running(process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        os.killpg(process.pid, number)
        while not is_dead(path) and time.monotonic() < end:
            time.sleep(0.1)
    assert is_dead(path)
    assert cli.main(["list", str(tmp_path / "dumps")]) == 0
    assert "gone" not in capsys.readouterr().out
    assert dumps_in(tmp_path) == []
    assert not path.exists()


def running(pid: int) -> bool:
    """Whether a thread of it is not stopped yet: the whole process would die of the signal then."""
    states = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return any(state.rpartition(")")[2].split()[0] != "T" for state in states)


def is_dead(path: Path) -> bool:
    with black_box.opened(path) as box:
        return box is not None and box.dead


@pytest.mark.long("an engine for each signal and place")
@pytest.mark.parametrize(
    ("at", "overlap"),
    [("start", "1"), ("forward", "1"), ("forward", "0"), ("idle", "1"), ("write", "1")],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_each_signal_at_each_place(tmp_path, number, at, overlap):
    wait = ("wait",) if at == "idle" else ()
    run = killed(tmp_path, at, str(int(number)), "plain", "1", overlap, *wait)
    (record,) = run.dumps
    assert record.finding.kind == ("killed" if number is signal.SIGKILL else "native-crash")
    assert record.finding.got.startswith(f"signal {int(number)} ({number.name})")
    steps = [s.step for s in record.steps]
    assert steps == list(range(1, len(steps) + 1))
    assert bool(steps) == (at != "start")
    assert boxes(tmp_path) == []


@pytest.fixture
def cgroup():
    """A cgroup of this process's with 3 GB of memory: version 1, and only where we may make it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    inside = [line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")]
    folder = Path(f"/sys/fs/cgroup/memory{inside[0] if inside else ''}/g4debug-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text("3000000000")
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    yield folder
    end = time.monotonic() + 30
    while (folder / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    folder.rmdir()


@pytest.mark.long("an engine in a cgroup of its own")
def test_the_oom_killer_is_told_apart(tmp_path, cgroup):
    """The scheduler takes all of the cgroup's memory, and the kernel kills it."""
    how = plugin(tmp_path, "forward", "memory")
    command = (str(HERE / "drive_killed.py"), "mtp", "1", "1")
    with started(tmp_path, *command, cold=True, **how) as (process, log):
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        process.wait(300)
    (record,) = dumps_in(tmp_path)
    assert record.finding.kind == "oom-killed", log.read_text()[-3000:]
    assert "has killed 1 process of its cgroup" in record.finding.cause


@pytest.mark.long("an engine of two ranks")
def test_one_rank_of_two(tmp_path):
    run = killed(tmp_path, "forward", KILL, "mtp", "2", "1", KILL_RANK="1")
    first, other = sorted(run.dumps, key=lambda r: r.created)
    assert (first.finding.kind, first.finding.location.rank) == ("killed", 1)
    assert other.finding.location.rank == 0
    # It was told, or its own collective broke first.
    assert other.finding.kind in ("other-rank", "exception")
    assert first.launch == other.launch
    assert boxes(tmp_path) == []


@pytest.mark.long("an engine of two ranks")
def test_both_ranks_at_once(tmp_path):
    run = killed(tmp_path, "forward", KILL, "mtp", "2", "1", KILL_RANK="both")
    found = {record.finding.location.rank: record.finding.kind for record in run.dumps}
    assert sorted(found) == [0, 1]
    assert "killed" in found.values()
    assert set(found.values()) <= {"killed", "other-rank", "exception"}
    assert boxes(tmp_path) == []


@pytest.mark.long("an engine for the case that is rarer")
def test_the_whole_server_is_killed_while_somebody_reads(tmp_path):
    """Nobody is left to make the dump, so ``g4debug list`` does: once, whoever else looks."""
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for path in black_box.paths():
                with black_box.opened(path) as box:
                    if box is not None and not box.dead:
                        with contextlib.suppress(black_box.BoxError):
                            box.read()

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        run = killed(tmp_path, "server", KILL)
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert run.dumps == []
    assert len(boxes(tmp_path)) == 1
    command = [sys.executable, "-m", "g4debug", "list", str(tmp_path / "dumps")]
    lists = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = [process.communicate(timeout=120)[0] for process in lists]
    (record,) = dumps_in(tmp_path)
    assert any("the scheduler is gone" in text for text in out)
    assert record.finding.kind == "gone"
    assert "the server's main process is gone, too" in record.finding.got
    assert record.steps
    assert boxes(tmp_path) == []


@pytest.mark.long("an engine of two ranks")
def test_one_data_parallel_rank_of_two(tmp_path, capsys):
    """SGLang goes on with the other one, and the requests of this one wait for ever."""
    how = plugin(tmp_path, "forward", KILL) | {"KILL_RANK": "dp1"}
    command = (str(HERE / "drive_killed.py"), "plain", "dp2", "1")
    with started(tmp_path, *command, **how) as (_, log):
        end = time.monotonic() + 300
        while len(dumps_in(tmp_path)) < 2 and time.monotonic() < end:
            time.sleep(0.5)
        found = {record.finding.location.dp_rank: record for record in dumps_in(tmp_path)}
    assert sorted(found) == [0, 1], log.read_text()[-3000:]
    assert found[1].finding.kind == "killed"
    assert found[0].finding.kind == "other-rank"
    assert "rank dp1/tp0/pp0" in found[0].finding.headline
    assert found[0].launch == found[1].launch
    assert cli.main(["list", str(tmp_path / "dumps")]) == 0
    listed = capsys.readouterr().out
    assert "incident: 2 dumps of 2 processes" in listed
    assert "DP 0, TP 0" in listed
    assert "DP 1, TP 0" in listed
