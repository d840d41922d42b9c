"""``g4debug doctor --pid``: real processes that show a status, or show none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from g4debug.cli import _tape, main
from g4debug.findings import launch_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

# A scheduler as far as doctor can see: a recorder, a status, a teller. argv: what to do to it.
SCHEDULER = """
import os, sys, time
from types import SimpleNamespace
from g4debug.findings import status_publisher as module
from g4debug.findings.steps import Recorder

recorder = Recorder(4)
part = recorder.status.part("page-table")
part.mode = "raise"
recorder.step = 7
part.checked(3, "tables")
teller = module.StatusPublisher(recorder.status, {"role": "scheduler", "mode": "raise"})
teller.open()
args = SimpleNamespace(served_model_name="m", enable_metrics=False)
teller.attach(SimpleNamespace(server_args=args, tp_rank=1))
exec(sys.argv[1])
teller.tell(time.monotonic())
print("up", flush=True)
sys.stdin.read()
"""
STUCK = "teller.beat(); time.monotonic = lambda now=time.monotonic: now() - 99"


@contextlib.contextmanager
def process(code, *arguments, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("G4DEBUG_", "SGLANG_"))}
    running = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**clean, **environ},
    )
    try:
        assert running.stdout.readline() == b"up\n"
        yield running.pid
    finally:
        running.communicate()


def ask(capsys, pid):
    code = main(["doctor", "--pid", str(pid), "--json"])
    return code, json.loads(capsys.readouterr().out)


def say(capsys, pid):
    code = main(["doctor", "--pid", str(pid), "--width", "100"])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_sound_scheduler(capsys):
    with process(SCHEDULER, "teller.beat()") as pid:
        code, told = ask(capsys, pid)
        (only,) = told["processes"]
        assert (code, told["sound"]) == (0, True)
        assert (only["phase"], only["step"], only["rank"]) == ("serving", 7, "tp 1, pp 0, dp 0")
        assert only["tracers"][0]["checked"] == [{"what": "tables", "count": 3, "step": 7}]
        code, text = say(capsys, pid)
        assert code == 0
        assert "page-table armed: raise checked 3 tables (last in step 7)" in text


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("part.limit('ranges only', 'pages move')", "limited since step 7: ranges only (pages mov"),
        ("part.off('the device is lost')", "page-table is off since step 7: the device is lost"),
        ("part.audited({'attn.x': 'gone'})", "its hook does not run at attn.x: gone"),
        (STUCK, "it is stuck"),
    ],
)
def test_what_is_not_as_it_should_be_comes_first(capsys, deed, said):
    with process(SCHEDULER, deed) as pid:
        code, told = ask(capsys, pid)
        assert (code, told["sound"]) == (1, False)
        assert said in told["headline"]
        code, text = say(capsys, pid)
        assert code == 1
        assert said in text


def test_a_process_that_is_stopped_is_not_said_to_be_stuck(capsys, monkeypatch):
    """By kill -STOP, or by a debugger: its event loop can do nothing about that."""
    monkeypatch.setattr(_tape, "LATE", 0.2)
    with process(SCHEDULER, STUCK) as pid:
        os.kill(pid, signal.SIGSTOP)
        while launch_memory.stat(pid)[0] != "T":
            time.sleep(0.01)
        try:
            code, text = say(capsys, pid)
            assert main(["doctor", "--pid", str(pid), "--request", "r"]) == 2
        finally:
            os.kill(pid, signal.SIGCONT)
    assert code == 1
    assert "the process is stopped (by a signal, or by a debugger), and has told nothing" in text
    assert "is stuck" not in text
    assert "the process is stopped" in capsys.readouterr().err


def test_nothing_to_judge_is_sound_and_what_it_runs_is_named(capsys):
    deed = "part.nothing('no draft'); recorder.status.serves = 'Llama on triton, no draft'"
    with process(SCHEDULER, f"{deed}; teller.beat()") as pid:
        code, text = say(capsys, pid)
    assert code == 0
    assert "runs Llama on triton, no draft" in text
    assert "page-table armed: raise; nothing to judge: no draft" in text


def test_a_scheduler_below_the_process_that_is_named(capsys):
    parent = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "teller.beat()"])
        child.wait()
    """
    with process(parent, SCHEDULER) as pid:
        code, told = ask(capsys, pid)
    assert code == 0
    assert [p["role"] for p in told["processes"]] == ["", "scheduler"]


NONE = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "no tracer is armed, SGLANG_TRTLLM_MHA_DEBUG=1 was not set"),
        ({"SGLANG_TRTLLM_MHA_DEBUG": "1"}, "although its environment arms tracers"),
        (
            {"SGLANG_TRTLLM_MHA_DEBUG": "1", "SGLANG_PLUGINS": "other, another"},
            "SGLANG_PLUGINS=other, another keeps SGLang from loading g4debug",
        ),
        (  # empty: SGLang loads all
            {"SGLANG_TRTLLM_MHA_DEBUG": "1", "SGLANG_PLUGINS": ""},
            "although its environment arms tracers",
        ),
        ({"G4DEBUG_MODE": "loud"}, "its environment is wrong"),
    ],
)
def test_a_process_without_a_status_says_why(capsys, environ, said):
    with process(NONE, **environ) as pid:
        code, told = ask(capsys, pid)
        (only,) = told["processes"]
        assert code == 1
        assert said in only["problem"]
        assert "no scheduler shows a status" in told["headline"]
        assert said in say(capsys, pid)[1]


def test_a_process_that_is_no_python_is_only_counted(capsys):
    parent = """
        import subprocess, sys
        # The shell itself says that it is up: before, it may still be the Python that started it.
        child = subprocess.Popen(["sh", "-c", "echo up; read end"], stdin=subprocess.PIPE)
        sys.stdin.read()
        child.communicate()
    """
    with process(parent) as pid:
        _, told = ask(capsys, pid)
        assert [p["title"] for p in told["processes"]][1:] == ["sh -c echo up; read end"]
        _, said = say(capsys, pid)
    assert "sh -c" not in said
    assert said.endswith("and 1 more process, which is no Python")


def test_the_recorder_is_not_said_to_have_checked_nothing(capsys):
    from rich.console import Console

    from g4debug.findings.status import TracerStatus
    from g4debug.reporters import running

    tracers = (TracerStatus("flight-recorder", "raise"), TracerStatus("page-table", "raise"))
    one = running.Process(7, has_status=True, role="scheduler", tracers=tracers)
    running.render(running.Server(7, [one]), Console(width=80))
    said = capsys.readouterr().out
    assert "records; it has nothing to check" in said
    assert said.count("has checked nothing yet") == 1


def test_no_such_process_is_told_in_one_line(capsys):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert main(["doctor", "--pid", str(ended.pid)]) == 2
    err = capsys.readouterr().err
    assert "there is no process" in err
    assert err.count("\n") == 1


def test_what_another_process_says_cannot_steer_the_terminal(capsys):
    with process(SCHEDULER, r"part.limit('\x1b[2J', '\x1b]0;x\x07')") as pid:
        say(capsys, pid)
        assert main(["doctor", "--pid", str(pid)]) == 1
        assert "\x1b" not in capsys.readouterr().out
