"""repro/harness/warm: what it forked ends as Python ends it, and with whoever asked for it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import warm

REPRO = Path(__file__).parents[2] / "repro"
SECONDS = 120.0
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="needs sglang, which it imports"
    ),
]
SLEEPER = """
import subprocess, sys, time
from pathlib import Path
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(600)
"""
SCRIPT = """
import os, sys
sys.path.insert(0, sys.argv[1])
from harness.processes import warm_group
with open(sys.argv[2] + ".log", "wb") as sink:
    with warm_group([sys.executable, sys.argv[3], sys.argv[2]], dict(os.environ), sink) as process:
        process.wait(600)
"""

ENDING = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
def late():
    threading.main_thread().join()
    print("a thread", flush=True)
threading.Thread(target=late).start()
print("main", end=" ")  # it stays in the buffer
"""


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('in words')", 1, "in words"),
        ("raise ValueError('no')", 1, "ValueError: no"),
    ],
)
def test_a_process_ends_as_python_ends_it(tmp_path, last, status, said):
    """Its threads are waited for, its functions at exit are called, and all that it printed is in
    the log. ``cold`` has no part of ours in its end."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(ENDING + last)
    with log.open("wb") as sink:
        assert warm.start((str(script),), os.environ, sink.fileno()).wait(SECONDS) == status
    cold = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert cold.returncode == status
    for text in (log.read_text(), cold.stdout.decode()):
        assert text.index("main") < text.index("a thread") < text.index("at exit")
        assert said in text


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def until(true, what):
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long("another signal"))],
)
def test_a_script_that_is_killed_leaves_no_process(tmp_path, number):
    script, sleeper, told = tmp_path / "script.py", tmp_path / "sleeper.py", tmp_path / "pid"
    script.write_text(textwrap.dedent(SCRIPT))
    sleeper.write_text(textwrap.dedent(SLEEPER))
    command = [sys.executable, str(script), str(REPRO), str(told), str(sleeper)]
    with subprocess.Popen(command, env=dict(os.environ)) as process:
        try:
            until(lambda: told.is_file() and told.read_text(), "nothing was forked")
            grandchild = int(told.read_text())
            assert lives(grandchild)
        finally:
            process.send_signal(number)
    until(lambda: not lives(grandchild), "it outlived the script")
