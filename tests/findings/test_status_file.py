"""A process shows its status, and another one reads it: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

from g4debug.findings.status import Status
from g4debug.findings.status_file import (
    ASKED_BYTES,
    MAX_BYTES,
    StatusFile,
    StatusFileError,
    ask,
    read,
    withdraw,
)
from g4debug.findings.status_publisher import StatusPublisher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")


@pytest.fixture
def board():
    made = StatusFile()
    yield made
    made.close()


def test_what_was_written_last_is_read(board):
    board.write({"step": 1, "long": "x" * 5000})
    board.write({"step": 2})
    assert read(os.getpid()) == {"step": 2}


def test_a_process_without_a_board_shows_nothing(board):
    board.close()
    board.write({"step": 3})  # nothing happens
    assert read(os.getpid()) is None


def test_a_question_reaches_the_process_and_leaves_its_status_alone(board):
    board.write({"step": 2})
    assert board.asked() == b""
    ask(os.getpid(), b"q" * ASKED_BYTES)
    assert board.asked() == b"q" * ASKED_BYTES
    board.write({"step": 3, "long": "x" * 5000})
    assert board.asked() == b"q" * ASKED_BYTES
    assert read(os.getpid())["step"] == 3
    board.close()
    assert board.asked() == b""
    with pytest.raises(StatusFileError, match="shows no status"):
        ask(os.getpid(), b"")


def test_too_much_is_refused(board):
    with pytest.raises(StatusFileError, match="at most"):
        board.write({"x": "y" * MAX_BYTES})


def test_there_must_be_such_a_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(StatusFileError, match="no such process"):
        read(process.pid)


def test_what_is_half_written_or_newer_is_not_believed(board):
    board.write({"step": 1})
    os.pwrite(board.fd, b"x", 34)
    with pytest.raises(StatusFileError, match="damaged"):
        read(os.getpid())
    os.pwrite(board.fd, b"g4debug-status 9 2 00000000\n{}", 0)
    with pytest.raises(StatusFileError, match="format 9"):
        read(os.getpid())


def test_a_reader_never_sees_a_mixture(board):
    """A thread writes long and short ones while this one reads."""
    done = threading.Event()
    board.write({"n": 0, "fill": ""})

    def write():
        n = 0
        while not done.is_set():
            n += 1
            board.write({"n": n, "fill": str(n % 10) * (n % 7 * 9000)})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            found = read(os.getpid())
            assert found["fill"] == str(found["n"] % 10) * (found["n"] % 7 * 9000)
    finally:
        done.set()
        thread.join()


def test_children_do_not_show_their_parents_status(board):
    board.write({"step": 1})
    started = "import sys; print('up', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", started], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    try:
        assert read(process.pid) is None
    finally:
        process.communicate()
    forked = """
        import os, sys
        from g4debug.findings.status_file import StatusFile, read
        StatusFile().write({"step": 1})
        ready, go = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        child = int(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()[0])
        print(read(os.getpid()), read(child))
        os.write(go[1], b"x")
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(forked)], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "{'step': 1} None"


@pytest.mark.parametrize("earlier", [b"", b"1" * ASKED_BYTES])
def test_a_question_that_nobody_waits_for_is_withdrawn(board, earlier):
    """A process that goes on after that writes no dump for nobody."""
    if earlier:
        ask(os.getpid(), earlier)
    board.write({"step": 2})
    question, other = b"2" * ASKED_BYTES, b"3" * ASKED_BYTES
    before = ask(os.getpid(), question)
    withdraw(os.getpid(), question, before)
    assert board.asked() == earlier
    assert read(os.getpid()) == {"step": 2}
    before = ask(os.getpid(), question)
    ask(os.getpid(), other)
    withdraw(os.getpid(), question, before)
    assert board.asked() == other


def test_who_was_stopped_writes_no_dump_for_a_question_that_was_withdrawn(monkeypatch):
    from g4debug.cli import CliError, _tape

    monkeypatch.setattr(_tape, "LATE", 0.2)
    status, written_ones = Status(SimpleNamespace(step=7)), []
    status.snapshot = lambda: lambda: (written_ones.append(1), ("/dumps/1.pt", ""))[1]
    publisher = StatusPublisher(status, {})
    publisher.open()
    try:
        publisher.tell(0.0)
        with pytest.raises(CliError, match="did not answer within 0 s"):
            _tape.dump_of(os.getpid())
        publisher.tell(1.0)
        written()
        assert written_ones == []
    finally:
        publisher.close()


def test_a_dump_that_is_asked_for_is_written_once():
    asked = []

    def snapshot():
        asked.append(1)
        return lambda: (f"/dumps/{len(asked)}.pt", "")

    status = Status(SimpleNamespace(step=7))
    publisher = StatusPublisher(status, {})
    publisher.open()
    try:
        question = b"1" * ASKED_BYTES
        ask(os.getpid(), question)
        publisher.tell(0.0)
        assert read(os.getpid())["no_dump"] == "the flight recorder is not armed"
        status.snapshot = snapshot
        ask(os.getpid(), b"2" * ASKED_BYTES)
        for _ in range(3):
            publisher.tell(0.0)
            written()
        told = read(os.getpid())
        assert (told["asked"], told["dump"]) == ((b"2" * ASKED_BYTES).hex(), "/dumps/1.pt")
        assert len(asked) == 1
    finally:
        publisher.close()


def written():
    """Wait until the dump that is being written is done."""
    for thread in threading.enumerate():
        if thread.name == "g4debug-dump":
            thread.join(60)


def test_the_event_loop_goes_on_while_a_dump_is_written():
    loop, disk, threads = threading.get_ident(), threading.Event(), []

    def snapshot():
        threads.append(("copied", threading.get_ident()))

        def rest():
            threads.append(("written", threading.get_ident()))
            assert disk.wait(60)
            return "/dumps/1.pt", ""

        return rest

    status = Status(SimpleNamespace(step=7))
    status.snapshot = snapshot
    publisher = StatusPublisher(status, {})
    publisher.open()
    first, second = b"1" * ASKED_BYTES, b"2" * ASKED_BYTES
    try:
        ask(os.getpid(), first)
        publisher.tell(1.0)  # with the work in here it would not come back
        ask(os.getpid(), second)
        publisher.tell(2.0)
        assert read(os.getpid())["told"] == 2.0
        assert "asked" not in read(os.getpid())
        disk.set()
        written()
        publisher.tell(3.0)
        assert (read(os.getpid())["asked"], read(os.getpid())["dump"]) == (
            first.hex(),
            "/dumps/1.pt",
        )
        written()  # who asked meanwhile has waited for the first
        publisher.tell(4.0)
        assert read(os.getpid())["asked"] == second.hex()
        assert [what for what, _ in threads] == ["copied", "written"] * 2
        assert [(what == "copied") == (thread == loop) for what, thread in threads] == [True] * 4
    finally:
        disk.set()
        publisher.close()


def test_a_dump_that_fails_is_told_as_such():
    def fails():
        raise OSError(28, "No space left on device")

    status = Status(SimpleNamespace(step=7))
    status.snapshot = lambda: fails
    publisher = StatusPublisher(status, {})
    publisher.open()
    try:
        ask(os.getpid(), b"1" * ASKED_BYTES)
        publisher.tell(1.0)
        written()
        publisher.tell(2.0)
        assert read(os.getpid())["no_dump"] == "OSError: [Errno 28] No space left on device"
    finally:
        publisher.close()


def test_metrics_that_fail_do_not_make_a_scheduler_look_stuck(caplog):
    def fails():
        raise OSError(28, "No space left on device")

    publisher = StatusPublisher(Status(SimpleNamespace(step=7)), {})
    publisher.open()
    publisher.metrics = SimpleNamespace(update=fails)
    try:
        publisher.tell(4.0)
        publisher.tell(5.0)
        assert read(os.getpid())["told"] == 5.0
        assert caplog.text.count("/metrics is not told any more") == 1
    finally:
        publisher.close()
