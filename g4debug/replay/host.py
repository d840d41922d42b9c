"""Starts the process of a replay, gives it jobs, and reads their results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any

import g4debug
from g4debug import cpu
from g4debug.dumps import reading
from g4debug.dumps.errors import DumpError
from g4debug.findings import tape
from g4debug.findings.decisive import DECISIVE
from g4debug.findings.record import Plain, Tape, TrapRecord
from g4debug.findings.tape import Recording
from g4debug.replay.setting import CannotReplay, Setting
from g4debug.replay.workload import IDLE, Workload

ROOT = Path(g4debug.__file__).resolve().parents[1]
STOPPED = "stopped"
UP = 600.0  # seconds until a scheduler must be there
LATER = 60.0  # seconds behind its time by which a job must have been ended
SAID = 500  # characters of a log's end in a message
Progress = Callable[[int], None]  # told of the number of steps up to now


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    ended: "tape" (all was given), "raised", "stuck", "late", "died" or "stopped", by
    Ctrl-C or because time or memory were used up. error: the exception's text, or why it was
    stopped, "" for Ctrl-C. recording: the tape of this scheduler. scheduler: the settings by
    which it decides, as in ``Tape.scheduler``. records: its findings' dumps, oldest first. last:
    its last dump, with or without a finding; its history is compared. lacking: how many verifies
    are not on the tape. reached: at each event that was given, how many tokens each request had
    that was given before, -1 if it had ended. idle: the idle rounds at its end. works: requests had
    not ended when all was given.
    """

    ended: str
    error: str
    recording: Recording | None
    scheduler: dict[str, Plain]
    records: tuple[TrapRecord, ...]
    last: TrapRecord | None
    lacking: int
    seconds: float
    reached: tuple[dict[int, int], ...] = ()
    idle: int = 0
    works: bool = False


class Host:
    """A scheduler that waits for jobs."""

    def __init__(
        self, process: subprocess.Popen[bytes], answers: FileIO, on: Tape, folder: Path, dumps: Path
    ) -> None:
        self.process, self.answers, self.folder, self.dumps = process, answers, folder, dumps
        self._read = b""  # of the answers, behind the last whole line
        self.page, self.firsts = on.page, on.firsts
        self.drafts = int(on.scheduler.get("speculative_num_draft_tokens") or 1)
        self.jobs = 0
        self.without: tuple[str, ...] = ()

    def wait(self, progress: Progress) -> None:
        """Until the scheduler is up. without: the arguments that this release does not have."""
        self.without = tuple(self._until("ready", True, progress, UP)["without"])

    def run(
        self,
        seconds: float,
        progress: Progress,
        workload: Workload | None = None,
        idle: int = IDLE,
        until: int = 0,
        to_the_end: bool = False,
    ) -> Outcome:
        """workload: the part of the tape that is given, None for all; then it ends after so many
        ``idle`` rounds. until: the last step that is wanted, 0 for all. to_the_end: see ``Feeder``.

        Ctrl-C ends it with the step that runs, if all is given; a second one at once.
        """
        self.jobs += 1
        begin = time.monotonic()
        result = self.folder / f"job-{self.jobs}.json"
        stop = result.with_suffix(".stop")
        for old in (result, result.with_suffix(".tape"), stop):
            old.unlink(missing_ok=True)
        job = {
            "result": str(result), "seconds": seconds, "idle": idle, "until": until,
            "to_the_end": to_the_end,
            "workload": None if workload is None else workload.plain(), "stop": str(stop),
        }  # fmt: skip
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise CannotReplay(f"its process has ended; {self._log_end()}") from None
        try:
            news = self._until("done", job["result"], progress, seconds + LATER)
        except KeyboardInterrupt:
            if workload is not None:
                raise
            stop.touch()
            news = self._until("done", job["result"], progress, seconds + LATER)
        took = time.monotonic() - begin
        records = dumps_in(self.dumps, news["pid"])
        if not result.exists():
            late = os.WIFSIGNALED(news["status"]) and took >= seconds
            error = f"exit status {news['status']}; {_end_of(Path(f'{result}.log'))}"
            if news["large"]:
                return Outcome("large", news["large"], None, {}, records, None, 0, took)
            return Outcome("late" if late else "died", error, None, {}, records, None, 0, took)
        found = json.loads(result.read_text())
        if found.get("last"):
            records = tuple(r for r in records if r.finding.kind != "asked")
            last: TrapRecord | None = reading.read(Path(found["last"]))
        else:
            last = records[-1] if records else None
        taped = result.with_suffix(".tape")
        recording = (
            tape.read(taped.read_bytes(), self.page, self.firsts) if taped.exists() else None
        )
        stopped = stop.exists() and found["ended"] == "tape"
        return Outcome(
            STOPPED if stopped else found["ended"],
            stop.read_text() if stopped else found.get("error", ""),
            recording,
            found.get("scheduler", {}),
            records,
            last,
            found["lacking"],
            took,
            tuple({int(k): n for k, n in state.items()} for state in found["reached"]),
            found["idle"],
            found.get("works", False),
        )

    def _until(
        self, what: str, value: object, progress: Progress, seconds: float
    ) -> dict[str, Any]:
        """The news in which ``what`` is this value. Raises CannotReplay."""
        for line in self._lines(seconds):
            news: dict[str, Any] = json.loads(line)
            if news.get(what) == value:
                return news
            if "failed" in news:
                why = f"the scheduler did not start: {news['failed']}; {self._log_end()}"
                raise CannotReplay(why)
            progress(int(news.get("steps", 0)))
        when = "before it was up" if what == "ready" else "in the middle of it"
        raise CannotReplay(f"its process ended {when}; {self._log_end()}")

    def _lines(self, seconds: float) -> Iterator[bytes]:
        """The news, until the process ends. Raises CannotReplay if that takes longer."""
        end = time.monotonic() + seconds
        while True:
            while b"\n" in self._read:
                line, _, self._read = self._read.partition(b"\n")
                yield line
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                why = f"its process had not answered after {seconds:.0f} s"
                raise CannotReplay(f"{why}; {self._log_end()}")
            more = self.answers.read(1 << 16)
            if not more:
                return
            self._read += more

    def _log_end(self) -> str:
        """The end of the process's log, which is gone when the message is read."""
        return _end_of(self.folder / "log")


def _end_of(log: Path) -> str:
    """The end of a log, in words."""
    said = log.read_text(errors="replace").strip() if log.exists() else ""
    lines = [line.strip() for line in said[-4 * SAID :].splitlines() if line.strip()]
    return f"its log ends: {' | '.join(lines)[-SAID:]}" if lines else "its log is empty"


def dumps_in(folder: Path, pid: int | str = "*") -> tuple[TrapRecord, ...]:
    """The findings' dumps of a process, or of all, oldest first."""
    found = []
    for path in sorted(folder.glob(f"*-{pid}-*.pt")):
        with contextlib.suppress(DumpError):
            found.append(reading.read(path))
    return tuple(sorted(found, key=lambda r: r.created))


@contextmanager
def started(
    dump: Path,
    on: Tape,
    setting: Setting,
    trace: tuple[str, ...],
    folder: Path,
    progress: Progress,
    pages_only: bool,
) -> Iterator[Host]:
    """Start a scheduler for the dump's tape.

    trace: the tracers to arm, () for those of ``SGLANG_TRTLLM_MHA_DEBUG=1``. pages_only: nobody
    looks at what the model computes.

    Raises CannotReplay if it does not come up.
    """
    order = folder / "order.json"
    order.write_text(
        json.dumps(
            {
                "dump": str(dump.resolve()),
                "arguments": setting.arguments,
                "drafts": setting.drafts,
                "model": dataclasses.asdict(setting.model),
                "pages_only": pages_only,
            }
        )
    )
    # Its own, because another process may have had the same number.
    dumps = Path(tempfile.mkdtemp(prefix="dumps-", dir=folder))
    readable, writable = os.pipe()
    with (folder / "log").open("wb") as log:
        environ = environment(setting, trace, dumps)
        process = begun(python(setting.release), order, environ, log.fileno(), writable)
    os.close(writable)
    try:
        with FileIO(readable) as answers:
            host = Host(process, answers, on, folder, dumps)
            host.wait(progress)
            yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def begun(
    interpreter: str, order: Path, environ: dict[str, str], log: int, answers: int
) -> subprocess.Popen[bytes]:
    """The process of a replay, in a session of its own. log, answers: descriptors."""
    return subprocess.Popen(
        [interpreter, "-m", "g4debug.replay.child", str(order), str(answers)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=(answers,),
        start_new_session=True,
    )


def environment(setting: Setting, trace: tuple[str, ...], dumps: Path) -> dict[str, str]:
    """This process's variables without SGLang's and g4debug's; the server's; a replay's."""
    mine = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("G4DEBUG_", "SGLANG_")) and k not in DECISIVE
    }
    mine["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), mine.get("PYTHONPATH", ""))))
    asked = {
        "SGLANG_TRTLLM_MHA_DEBUG": "1",
        "SGLANG_TRTLLM_MHA_DEBUG_DIR": str(dumps),
        "G4DEBUG_NOT_RUN_ON_THIS_RELEASE": "1",
        "G4DEBUG_TAPE": "48",
        "G4DEBUG_MAX_DUMPS": "1000",
    }
    if trace:
        asked["G4DEBUG_TRACE"] = ",".join(dict.fromkeys((*trace, "flight-recorder")))
    return cpu.environment({**mine, **setting.environ, **asked})


def python(release: str) -> str:
    """A Python that has this SGLang: this one, or one in an environment of the clone.

    Raises CannotReplay if there is none.
    """
    try:
        if version("sglang") == release:
            return sys.executable
    except PackageNotFoundError:
        pass
    for name in (f".venv-{release}", ".venv"):
        found = ROOT / name / "bin" / "python"
        if found.exists() and _has(ROOT / name, release):
            return str(found)
    if release not in makeable():
        raise CannotReplay(cannot_make(release))
    raise CannotReplay(
        f"SGLang {release} is not installed here; run: make env SGLANG={release} in the clone"
    )


def makeable() -> list[str]:
    """The releases of SGLang of which this clone can make an environment; none without a clone."""
    files = (ROOT / "requirements").glob("sglang-*.txt") if (ROOT / "Makefile").exists() else ()
    return sorted(file.stem.removeprefix("sglang-") for file in files)


def made(release: str) -> None:
    """Make an environment with this SGLang in the clone, if there is none. It takes some minutes.

    Raises CannotReplay.
    """
    with contextlib.suppress(CannotReplay):
        python(release)
        return
    if release not in makeable():
        raise CannotReplay(cannot_make(release))
    command = ["make", "--no-print-directory", "env", f"SGLANG={release}"]
    if subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        raise CannotReplay(f"{' '.join(command)} failed, see above")


def cannot_make(release: str) -> str:
    """Why no environment with this SGLang is there, and none can be made, in words."""
    why = f"SGLang {release} is not installed here, and "
    if not makeable():
        return why + "environments are made in a clone of g4debug only"
    return why + f"an environment can be made of {', '.join(makeable())} only"


def _has(environment: Path, release: str) -> bool:
    return any(environment.glob(f"lib/python*/site-packages/sglang-{release}.dist-info"))
