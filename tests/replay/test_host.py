"""Environments with other releases of SGLang are made in the clone, and what cannot be is said."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4debug import cli
from g4debug.findings.record import Tape
from g4debug.replay import child, host
from g4debug.replay.setting import CannotReplay

pytestmark = pytest.mark.once("it needs no SGLang")
MAKEFILE = """env:
\t@echo made
\t@mkdir -p .venv-$(SGLANG)/bin .venv-$(SGLANG)/lib/python3/site-packages/sglang-$(SGLANG).dist-info
\t@touch .venv-$(SGLANG)/bin/python
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "requirements").mkdir()
    for name in ("sglang-0.4.1.txt", "sglang-0.4.2.txt", "torch.txt"):
        (tmp_path / "requirements" / name).touch()
    return tmp_path


def test_an_environment_is_made_once(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotReplay, match=r"run: make env SGLANG=0\.4\.2 in the clone"):
        host.python("0.4.2")
    for _ in range(2):
        host.made("0.4.2")
    assert host.python("0.4.2") == str(clone / ".venv-0.4.2" / "bin" / "python")
    out, err = capfd.readouterr()
    assert (out, err.count("made")) == ("", 1)  # stdout has the result, maybe as JSON


def test_a_release_that_nobody_can_make_is_refused_before_the_replay(
    clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "no-such-dump.pt", "--sglang", "0.4.3"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "an environment can be made of 0.4.1, 0.4.2 only" in said
    (clone / "Makefile").unlink()
    with pytest.raises(CannotReplay, match="in a clone of g4debug only"):
        host.made("0.4.2")


def test_a_make_that_fails_is_no_environment(clone: Path) -> None:
    (clone / "Makefile").write_text("env:\n\t@false\n")
    with pytest.raises(CannotReplay, match=r"make .* failed"):
        host.made("0.4.1")


ON = Tape(
    format=3, page=16, firsts=False, begins="start", first=0, steps=1, requests=0, size=0,
    events=np.zeros(0, dtype=np.int64), chunks=(), scheduler={},
)  # fmt: skip


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[str], host.Host]]:
    """Starts a process of Python's in place of a replay's; ``say`` is its pipe to the command."""
    begun: list[tuple[subprocess.Popen[bytes], FileIO]] = []

    def start(body: str) -> host.Host:
        readable, writable = os.pipe()
        code = f"import os, sys, time\nsay = lambda text: os.write({writable}, text)\n{body}"
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=(writable,),
            )  # fmt: skip
        os.close(writable)
        answers = FileIO(readable)
        begun.append((process, answers))
        return host.Host(process, answers, ON, tmp_path, tmp_path)

    yield start
    for process, answers in begun:
        process.kill()
        process.wait()
        answers.close()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def nothing(steps: int) -> None:
    """Nobody is told how far it is."""


def test_a_scheduler_that_does_not_come_up_is_not_waited_for_for_ever(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "UP", 0.5)
    waiting = running('say(b\'{"steps": 0}\\n{"st\')\ntime.sleep(600)')
    with pytest.raises(CannotReplay, match="had not answered after 0 s; its log is empty"):
        waiting.wait(nothing)


def test_news_that_come_in_parts_are_read(running: Any) -> None:
    started = running(
        'say(b\'{"steps": 3}\\n{"ready": tr\')\ntime.sleep(0.2)\n'
        'say(b\'ue, "without": ["x"]}\\n{"done"\')\ntime.sleep(600)'
    )
    told: list[int] = []
    started.wait(told.append)
    assert (told, started.without) == ([3], ("x",))


def test_a_process_that_dies_is_told_with_the_end_of_its_log(running: Any) -> None:
    gone = running("print('a word'); print('KeyError: 7', flush=True); sys.exit(3)")
    with pytest.raises(CannotReplay, match=r"ended before it was up; .*a word \| KeyError: 7"):
        gone.wait(nothing)
    gone.process.wait()
    with pytest.raises(CannotReplay, match=r"its process has ended; its log ends: .*KeyError: 7"):
        gone.run(1.0, nothing)


def test_a_process_that_dies_in_a_job_is_told(running: Any) -> None:
    gone = running('sys.stdin.readline(); say(b\'{"done": "an older job"}\\n\')')
    with pytest.raises(CannotReplay, match="ended in the middle of it; its log is empty"):
        gone.run(1.0, nothing)


def test_the_arguments_of_a_server_are_known_however_they_are_declared() -> None:
    class Struct:
        __struct_fields__ = ("a", "b")

    assert child._fields(Struct) == {"a", "b"}
    assert "dump" in child._fields(child.Order)
