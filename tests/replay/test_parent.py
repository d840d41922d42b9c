"""A process of a replay does not outlive the one that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.once("no SGLang is in it")
# The parent starts a process that sleeps, tells its id, and waits.
PARENT = """
import subprocess, sys, time
from g4debug.replay.parent import end_with_parent
asks = end_with_parent if sys.argv[1] == "asks" else None
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=asks)
print(child.pid, flush=True)
time.sleep(600)
"""


def outlives(asks: str) -> bool:
    """Whether the process still runs after the one that started it was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, asks], stdout=subprocess.PIPE, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        try:
            end = time.monotonic() + 20
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                if asks == "no" or time.monotonic() > end:
                    child.kill()
                    return True
                time.sleep(0.01)
        except psutil.NoSuchProcess:
            pass
        return False


def test_it_ends_with_the_process_that_started_it():
    assert not outlives("asks")


def test_one_that_does_not_ask_outlives_it():
    assert outlives("no")
