"""The demo as a user runs it: its variants, one verdict, and nothing left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_engine import NOHUP, TERMINAL
from warm import signals

from g4debug.dumps import reading

pytestmark = [
    pytest.mark.engine,
    pytest.mark.once("the demo puts its bug back, and its script ends alike, on each release"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the demo is run by hand"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
REPRO = Path(__file__).parents[2] / "repro" / "e4b_trtllm_mtp.py"
MARK = "G4_TEST_RUN"
CPU = ("--device", "cpu")
SIGNALS = pytest.mark.once("who ends a script, and what it leaves, is up to the script")


class Session:
    """A run and all its processes.

    Those that still have a mark in their environment lead to the sessions that the run opened;
    SGLang's children overwrite theirs with their titles, but stay in their parent's session.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        command: tuple[str, ...] = (sys.executable, str(REPRO)),
        ignored: tuple[signal.Signals, ...] = TERMINAL,
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4()}".encode()
        self.sessions: set[int] = set()
        self.out, self.err = folder / "out", folder / "err"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*signals(*ignored), *command, *flags],
                env={**clean, MARK: self.mark.decode().partition("=")[2]},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def alive(self) -> dict[int, str]:
        """Processes of this run, zombies apart, and what they are called."""
        processes = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(folder.name)
                status, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if status != "Z":
                    processes[pid] = int(session), folder
        found = {}
        for pid, (session, folder) in processes.items():
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                    self.sessions.add(session)
                    found[pid] = ""
        for pid, (session, folder) in processes.items():
            with contextlib.suppress(OSError):
                if pid in found or session in self.sessions:
                    found[pid] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def wait(self, seconds: float, until: str = "\0") -> int | None:
        """Watch until it ends (its exit status) or a process is called ``until`` (None)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            names = self.alive().values()
            if any(until in name for name in names):
                return None
            if self.process.poll() is not None:
                return self.process.returncode
            time.sleep(0.3)
        pytest.fail(f"still running after {seconds} s: {self.alive()}")

    def gone(self, seconds: float = 60) -> bool:
        """Whether all of them end within this time."""
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        return not self.alive()


@contextlib.contextmanager
def session(folder: Path, *flags: str, **how) -> Iterator[Session]:
    run = Session(folder, *flags, **how)
    try:
        yield run
    finally:
        for pid in run.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(60)


def test_all_variants_do_what_they_should(tmp_path):
    with session(tmp_path, *CPU, "--json") as run:
        status = run.wait(900)  # the other scripts run beside it
        err = run.err.read_text()
        assert status == 0, err[-4000:]
        # Its own, one for each variant, that of the warm process that forks the first four of them
        # (repro/harness/warm), and the replay's scheduler.
        assert len(run.sessions) == 8
        assert run.gone()
    result = json.loads(run.out.read_text())  # nothing else is on stdout
    assert result["good"] is True
    arms = result["arms"]  # the variants; the key is older than the word
    assert list(arms) == ["clean", "broken", "diagnosed", "fixed", "replayed"]
    assert all(arm["good"] is True for arm in arms.values()), arms
    assert arms["clean"]["status"] == arms["fixed"]["status"] == 0
    assert arms["broken"]["status"] != 0
    assert arms["diagnosed"]["status"] != 0
    assert arms["clean"]["swa_peak"] >= 0.85
    assert arms["clean"]["accept_length"] == pytest.approx(arms["fixed"]["accept_length"])
    assert "illegal memory access" in arms["broken"]["what"]
    assert arms["replayed"]["text"].startswith("reproduced: g4debug: page-table")
    # The verdicts once more, from what they stand on.
    path = Path(arms["diagnosed"]["dump"])
    record = reading.read(path)
    assert record.finding.location.runner == "draft"
    assert record.finding.location.layer_kind == "sliding"
    assert record.finding.location.request
    assert "use_sliding_window_kv_pool=False" in record.finding.cause
    assert "an illegal memory access was encountered" in err  # the user's real pain is shown
    assert record.finding.headline in err
    path.unlink()


@SIGNALS
def test_ctrl_c_in_the_middle_of_a_variant_leaves_nothing(tmp_path):
    with session(tmp_path, *CPU, "--arm", "clean") as run:
        assert run.wait(300, until="sglang::scheduler") is None
        assert len(run.alive()) >= 3  # this script, the variant, SGLang's scheduler
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        assert run.wait(300) == 130
        assert run.gone()
        assert "Traceback" not in run.err.read_text()
        assert "no process of ours is left" in run.out.read_text()


@SIGNALS
@pytest.mark.parametrize("ignored", [TERMINAL, NOHUP], ids=["terminal", "nohup"])
@pytest.mark.parametrize(
    ("name", "flags", "started"),
    [
        ("e4b_trtllm_mtp.py", [*CPU, "--variant", "clean"], "harness.engine"),
        ("matrix.py", ["--fault", "page-oob", "--jobs", "2"], "harness.mixed"),
        ("soak.py", [], "harness.mixed"),
        ("residual_aliasing.py", CPU, "workloads.residual_aliasing"),
    ],
)
def test_a_script_that_is_told_to_end_leaves_nothing(tmp_path, name, flags, started, ignored):
    """From a terminal and as nohup, CI and ``&`` start it: there Ctrl-C is not meant for it."""
    command = (sys.executable, str(REPRO.with_name(name)))
    with session(tmp_path, *flags, command=command, ignored=ignored) as run:
        assert run.wait(300, until=started) is None
        for number in ignored:
            run.process.send_signal(number)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(300) == 128 + signal.SIGTERM
        assert run.gone()
        assert "Traceback" not in run.err.read_text()
        said = run.out.read_text() + run.err.read_text()
        assert "stopped; no process of ours is left" in said


@SIGNALS
@pytest.mark.parametrize("ignored", [TERMINAL, NOHUP], ids=["terminal", "nohup"])
def test_so_does_make_that_is_told_to_end(tmp_path, ignored):
    """It tells its child, which must be the script and no shell that waits for it."""
    # -o: not the environment, this one is it.
    command = ("make", "-C", str(REPRO.parents[1]), "-o", "env", f"RUN={sys.executable}", "demo")
    arguments = "ARGS=--device cpu --arm clean"
    with session(tmp_path, arguments, command=command, ignored=ignored) as run:
        assert run.wait(300, until="harness.engine") is None
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(300) != 0
        assert run.gone()
        assert "stopped; no process of ours is left" in run.out.read_text()


@SIGNALS
@pytest.mark.parametrize("number", NOHUP)
def test_so_do_a_closed_terminal_and_its_other_keys(tmp_path, number):
    with session(tmp_path, *CPU, "--arm", "clean") as run:
        assert run.wait(300, until="harness.engine") is None
        run.process.send_signal(number)
        assert run.wait(300) == 128 + number
        assert run.gone()


@SIGNALS
def test_a_variant_ends_with_its_script_even_by_sigkill(tmp_path):
    for_hours = (sys.executable, str(REPRO.with_name("soak.py")), "--requests", "200000")
    with session(tmp_path, command=for_hours) as run:
        assert run.wait(300, until="sglang::scheduler") is None
        run.process.kill()
        assert run.wait(300) == -signal.SIGKILL
        assert run.gone()


def test_wrong_arguments():
    for flags in (
        ["--variant", "cleen"],
        ["--arm", "cleen"],
        ["--device", "tpu"],
        ["--requests", "many"],
    ):
        done = subprocess.run(
            [sys.executable, str(REPRO), *flags], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "usage:" in done.stderr
