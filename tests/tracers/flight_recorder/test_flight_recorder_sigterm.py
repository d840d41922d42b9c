"""SIGTERM and SIGHUP to real processes: healthy, stuck, forked, handled before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from real_engine import NOHUP, TERMINAL
from warm import signals

from g4debug.tracers.flight_recorder.sigterm import ALARM, LIMIT, SigtermWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")

# The child sleeps for 600, and waits for 300 for its dump; a busy machine is slow, too.
SOON = 120
CHILD = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from g4debug.tracers.flight_recorder import sigterm as module
from g4debug.tracers.flight_recorder.sigterm import SigtermWatch

module.LIMIT = 300.0
seen = Path(sys.argv[1])
watch = SigtermWatch(lambda n: seen.write_text("looked"), lambda why: print(why, file=sys.stderr))

def stuck(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("ready", hex(ctypes.addressof(mutex)), flush=True)
    library.pthread_mutex_lock(mutex)  # for ever; no signal ends it

def ready():
    print("ready", flush=True)

"""
BODIES = {
    "healthy": "watch.start(); ready()\nwhile True: pass",
    "asleep": "watch.start(); ready(); time.sleep(600)",
    "stuck": "watch.start(); stuck(ctypes.CDLL(None))",
    "gil": "module.ALARM = signal.SIGTRAP; watch.start(); stuck(ctypes.PyDLL(None))",
    "handled": (
        "signal.signal(signal.SIGTERM, lambda n, f: (seen.write_text(seen.read_text() + ', '"
        " + signal.Signals(n).name), os._exit(7)))\n"
        "watch.start(); ready(); time.sleep(600)"
    ),
    "ignored": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwatch.start(); ready(); sys.stdin.read()"
    ),
    "hup": (
        "watch.on_sigterm = lambda n: seen.write_text(str(n))\nwatch.start()\n"
        "os.kill(os.getpid(), signal.SIGHUP); ready(); time.sleep(600)"
    ),
    "stopped": "watch.start(); watch.stop(); ready(); time.sleep(600)",
    "restarted": "watch.start(); watch.stop(); watch.start(); ready(); time.sleep(600)",
    "thread": (
        "t = threading.Thread(target=watch.start); t.start(); t.join(); ready(); time.sleep(600)"
    ),
    # The dump itself may hang.
    "hanging-dump": (
        "module.LIMIT = 1.0\n"
        "watch.on_sigterm = lambda n: (seen.write_text('looked'), time.sleep(600))\n"
        "watch.start(); stuck(ctypes.CDLL(None))"
    ),
    "failing-dump": "watch.on_sigterm = lambda n: 1 / 0\nwatch.start(); stuck(ctypes.CDLL(None))",
    "other-signal": (
        "signal.signal(signal.SIGUSR1, lambda *a: None)\nwatch.start()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "while signal.getitimer(signal.ITIMER_REAL)[0]: time.sleep(0.01)  # or SIGALRM kills\n"
        "ready(); time.sleep(600)"
    ),
    # On a busy machine the thread may be done with the byte before the alarm has begun.
    "late-alarm": (
        "signal.signal(signal.SIGUSR1, lambda *a: None)\nwatch.start()\n"
        "left = lambda: signal.getitimer(signal.ITIMER_REAL)[0]\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nwhile left(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), module.ALARM)\nassert left()\n"
        "while left(): time.sleep(0.01)  # or SIGALRM kills\n"
        "ready(); time.sleep(600)"
    ),
    # A child shares the pipe: its end must not be ours.
    "fork": (
        "watch.start()\npid = os.fork()\nif pid == 0: time.sleep(600); os._exit(3)\n"
        "os.kill(pid, signal.SIGTERM); status = os.waitpid(pid, 0)[1]\n"
        "seen.write_text(str(os.WTERMSIG(status))); time.sleep(0.5)\n"
        "watch.on_sigterm = lambda n: None\nready(); time.sleep(600)"
    ),
    # What somebody else waits for on the wake-up descriptor still arrives there.
    "other-fd": (
        "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)\n"
        "watch.on_sigterm = lambda n: seen.write_bytes(os.read(r, 9))\nwatch.start(); ready()\n"
        "time.sleep(600)"
    ),
}


def run(
    tmp_path: Path,
    name: str,
    ignored: tuple[signal.Signals, ...] = TERMINAL,
    number: signal.Signals = signal.SIGTERM,
) -> tuple[int, str, float, str]:
    """Exit status, what the child noted, seconds from the signal to the end, stderr."""
    seen = tmp_path / "seen"
    process = subprocess.Popen(
        [*signals(*ignored), sys.executable, "-c", CHILD + BODIES[name], str(seen)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        word, *mutex = process.stdout.readline().split()
        assert word == "ready"
        end = time.monotonic() + SOON
        while mutex and not waits_for(process.pid, mutex[0]):
            assert time.monotonic() < end
            time.sleep(0.01)
        begin = time.monotonic()
        process.send_signal(number)
        if name == "ignored":
            process.stdin.close()  # the end of a child that lives on
        status = process.wait(2 * SOON)
        seconds = time.monotonic() - begin
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stderr is not None
    return status, seen.read_text() if seen.exists() else "", seconds, process.stderr.read()


def waits_for(pid: int, mutex: str) -> bool:
    """Whether its main thread is in the kernel on account of this mutex: a call and arguments."""
    return Path(f"/proc/{pid}/syscall").read_text().split()[1:2] == [mutex]


@pytest.mark.parametrize(
    "name", ["healthy", "asleep", "stuck", "restarted", "other-signal", "late-alarm"]
)
def test_it_looks_and_then_dies_of_the_signal_at_once(tmp_path, name):
    status, seen, seconds, _ = run(tmp_path, name)
    assert (status, seen) == (-signal.SIGTERM, "looked")
    assert seconds < SOON


@pytest.mark.parametrize("name", ["healthy", "asleep", "stuck", "restarted"])
def test_a_terminal_that_is_closed_is_looked_at_in_the_same_way(tmp_path, name):
    status, seen, _, _ = run(tmp_path, name, number=signal.SIGHUP)
    assert (status, seen) == (-signal.SIGHUP, "looked")


def test_behind_nohup_a_closed_terminal_does_nothing(tmp_path):
    status, seen, _, _ = run(tmp_path, "hup", NOHUP)
    assert (status, seen) == (-signal.SIGTERM, "15")


def test_a_handler_that_was_there_runs_after(tmp_path):
    status, seen, seconds, _ = run(tmp_path, "handled")
    assert (status, seen) == (7, "looked, SIGTERM")
    assert seconds < SOON


@pytest.mark.parametrize("name", ["healthy", "stuck"])
@pytest.mark.parametrize("ignored", [NOHUP, (ALARM,)], ids=["nohup", "alarm"])
def test_what_else_is_ignored_does_not_matter(tmp_path, name, ignored):
    status, seen, _, _ = run(tmp_path, name, ignored)
    assert (status, seen) == (-signal.SIGTERM, "looked")


def test_an_ignored_signal_stays_ignored(tmp_path):
    status, seen, _, err = run(tmp_path, "ignored")
    assert (status, seen) == (0, "")
    assert "SIGTERM is ignored" in err


def test_stopped_it_leaves_all_as_it_was(tmp_path):
    status, seen, seconds, _ = run(tmp_path, "stopped")
    assert (status, seen) == (-signal.SIGTERM, "")
    assert seconds < SOON


def test_outside_the_main_thread_it_says_that_it_cannot(tmp_path):
    status, seen, _, err = run(tmp_path, "thread")
    assert (status, seen) == (-signal.SIGTERM, "")
    assert "not the main thread" in err


def test_a_dump_that_hangs_does_not_keep_the_process(tmp_path):
    status, seen, seconds, _ = run(tmp_path, "hanging-dump")
    assert (status, seen) == (-signal.SIGTERM, "looked")
    assert 1.0 <= seconds < SOON


def test_a_dump_that_fails_is_told_and_does_not_keep_the_process(tmp_path):
    status, _, seconds, err = run(tmp_path, "failing-dump")
    assert status == -signal.SIGTERM
    assert "ZeroDivisionError" in err
    assert seconds < SOON


@pytest.mark.parametrize(
    "ignored",
    [
        pytest.param(TERMINAL, id="terminal"),
        pytest.param(NOHUP, id="nohup", marks=pytest.mark.long("started another way")),
    ],
)
def test_stuck_with_the_gil_it_cannot_look_but_dies(tmp_path, ignored):
    status, seen, seconds, _ = run(tmp_path, "gil", ignored)
    assert (status, seen) == (-signal.SIGALRM, "")
    assert signal.SIGTRAP - 1 < seconds < signal.SIGTRAP + SOON
    assert ALARM > LIMIT + 5  # as shipped: a dump that is being written is not cut off


def test_threads_that_fork_at_the_same_time_keep_their_own_signals():
    watch = SigtermWatch(lambda number: None, lambda why: None)
    watch.previous, watch._write = {signal.SIGTERM: signal.SIG_DFL}, 0
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def fork_with_all_blocked() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        watch._hold()

    try:
        watch._hold()
        other = threading.Thread(target=fork_with_all_blocked)
        other.start()
        other.join()
        watch._let_go()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_forked_child_that_is_killed_is_not_us(tmp_path):
    status, seen, _, _ = run(tmp_path, "fork")
    assert status == -signal.SIGTERM
    assert seen == str(int(signal.SIGTERM))


def test_another_user_of_the_wakeup_descriptor_gets_its_byte(tmp_path):
    status, seen, _, _ = run(tmp_path, "other-fd")
    assert (status, seen) == (-signal.SIGTERM, chr(signal.SIGTERM))
