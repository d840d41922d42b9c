"""The ranks of a launch and the memory that they share: real processes, started by this one."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import textwrap
import time

import pytest

from g4debug.findings import launch_memory, peer_ranks, process_end
from g4debug.findings.launch_memory import ALIVE, STOPPED, LaunchMemoryError, Stop
from g4debug.findings.peer_ranks import PeerRanks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")
FOUND = Stop("page-table", "out-of-range", "g4debug: page-table: a bad page …", "/dumps/a.pt")
PATIENCE = 60.0  # seconds: no busy machine takes so long
RANK = f"PATIENCE = {PATIENCE}\n" + textwrap.dedent("""
    import json, os, sys, time
    from g4debug.findings import peer_ranks
    from g4debug.findings.launch_memory import Stop
    from g4debug.findings.peer_ranks import PeerRanks

    def say(**what):
        print(json.dumps(what), flush=True)

    peer_ranks.LOOK, peer_ranks.WAIT = PATIENCE, float(sys.argv[2])
    others = PeerRanks()
    others.join("L")
    others.name_ranks(0, int(sys.argv[1]), 0)
    def on_stop(seat):
        say(first=seat.name, pid=seat.pid, stop=vars(seat.stop), at=time.monotonic())
        others.stop(Stop("flight-recorder", "other-rank"))
""")


@pytest.fixture
def server():
    made = PeerRanks()
    made.make("L")
    yield made
    made.close()


@contextlib.contextmanager
def rank(number: int, body: str, wait: float = PATIENCE):
    """A process that has joined, and does ``body``; it says one line before that.

    wait: seconds for which it waits for the others. A watcher that was not woken never looks.
    """
    command = [sys.executable, "-c", RANK + textwrap.dedent(body), str(number), str(wait)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process) -> dict:
    return json.loads(process.stdout.readline())


STUCK = """
    others.watch(on_stop)
    say(ready=True)
    sys.stdin.buffer.raw.read(1)  # as in a collective: nothing runs here, and the GIL is free
"""
FINDS = """
    say(ready=True)
    sys.stdin.buffer.raw.read(1)
    begin = time.monotonic()
    others.stop(Stop("page-table", "out-of-range", "g4debug: bad …", "/dumps/a.pt"))
    say(at=begin, waited=time.monotonic() - begin)
"""


def test_a_stuck_rank_is_told_who_stopped_and_why(server):
    with rank(1, STUCK) as stuck, rank(0, FINDS) as finder:
        assert said(stuck)["ready"]
        assert said(finder)["ready"]
        assert {s.name for s in server.memory.others()} == {"dp0/tp0/pp0", "dp0/tp1/pp0"}
        finder.stdin.write(b"!")
        finder.stdin.flush()
        told, found = said(stuck), said(finder)
        assert told["first"] == "dp0/tp0/pp0"
        assert told["pid"] == finder.pid
        assert told["stop"] == {
            "check": "page-table", "kind": "out-of-range", "headline": "g4debug: bad …",
            "dump": "/dumps/a.pt",
        }  # fmt: skip
        # It was woken: it did not only look by itself. And the other one waited for it, no longer.
        assert peer_ranks.GRACE <= told["at"] - found["at"] < PATIENCE
        assert peer_ranks.GRACE <= found["waited"] < PATIENCE
        assert server.found()


def test_a_rank_that_does_not_answer_is_not_waited_for_long(server):
    with rank(1, STUCK.replace("watch(on_stop)", "watch(lambda seat: None)")) as stuck:
        said(stuck)
        with rank(0, FINDS, wait=0.5) as finder:
            said(finder)
            finder.stdin.write(b"!")
            finder.stdin.flush()
            assert 0.5 <= said(finder)["waited"] < PATIENCE


def test_nobody_waits_for_a_rank_that_is_gone_or_does_not_watch(server):
    with rank(1, STUCK) as stuck, rank(2, "say(ready=True); time.sleep(60)") as blind:
        said(stuck)
        said(blind)
        stuck.kill()
        os.waitid(os.P_PID, stuck.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
        with rank(0, FINDS) as finder:
            said(finder)
            finder.stdin.write(b"!")
            finder.stdin.flush()
            assert said(finder)["waited"] < PATIENCE


def test_a_rank_that_ends_by_itself_is_not_told(server):
    with rank(1, STUCK.replace("sys.stdin", "others.ending = True; sys.stdin")) as ends:
        said(ends)
        with rank(0, FINDS, wait=0.5) as finder:
            said(finder)
            finder.stdin.write(b"!")
            finder.stdin.flush()
            assert said(finder)["waited"] >= 0.5
        ends.kill()
        assert ends.stdout.read() == b""


def test_what_a_crash_recorded_is_no_finding(server):
    server.join("L")
    server.stop(Stop("flight-recorder", "exception", "g4debug: it died"))
    assert not server.found()
    assert server.first() is None  # it is this process itself


def test_the_first_tensor_parallel_rank_of_a_group_leads(server):
    with rank(0, STUCK) as first, rank(1, STUCK) as other:
        assert said(first)["ready"]
        assert said(other)["ready"]
        server.join("L")
        assert server.leads()  # its number is not known yet
        for ranks, leads in (((0, 2, 0), False), ((1, 2, 0), True), ((0, 2, 1), True)):
            server.name_ranks(*ranks)
            assert server.leads() is leads, ranks
        server.name_ranks(0, 1, 0)
        assert not server.leads()
        first.kill()
        first.wait()
        assert server.leads()  # and tells, because the first one cannot any more
    assert PeerRanks().leads()  # of nobody


def test_only_the_first_reason_counts(server):
    server.join("L")
    server.stop(FOUND)
    server.stop(Stop("flight-recorder", "other-rank"))
    seat = server.memory.seat(server.memory.mine)
    assert (seat.state, seat.stop) == (STOPPED, FOUND)


def test_seats_of_processes_that_are_gone_are_taken_again(server):
    with rank(1, "say(ready=True); time.sleep(60)") as process:
        said(process)
        assert [(s.number, s.tp, s.state) for s in server.memory.others()] == [(0, 1, ALIVE)]
    with rank(3, "say(ready=True); time.sleep(60)") as process:
        said(process)
        assert [(s.number, s.tp, s.state) for s in server.memory.others()] == [(0, 3, ALIVE)]


def test_what_an_earlier_engine_left_is_not_told(server):
    with rank(0, FINDS) as finder:
        said(finder)
        finder.stdin.write(b"!")
        finder.stdin.flush()
        said(finder)
        server.memory.mine = 5  # so that the seat of the one that has gone stays
        server._joined = time.time_ns()
        assert server.memory.others()
        assert server.first() is None


def test_another_launch_is_not_joined():
    with pytest.raises(LaunchMemoryError, match="no process that this one was started by has it"):
        launch_memory.find("L")
    made = PeerRanks()
    made.make("other")
    try:
        with rank(0, "") as process:
            assert process.stdout.read() == b""
            assert process.wait(20) == 1
    finally:
        made.close()


def test_long_texts_are_cut(server):
    server.join("L")
    server.stop(Stop("c" * 100, "k", "ü" * 3000, "d"))
    stop = server.memory.seat(server.memory.mine).stop
    assert (len(stop.check), stop.kind, stop.dump) == (63, "k", "d")
    assert stop.headline == "ü" * 1199


def test_nothing_is_done_where_nobody_has_joined():
    alone = PeerRanks()
    alone.stop(FOUND)
    alone.name_ranks(0, 0, 0)
    alone.watch(lambda seat: None)
    assert alone.first() is None
    assert not alone.found()


def test_a_process_that_got_the_number_of_a_dead_rank_keeps_its_files(server, tmp_path):
    with (tmp_path / "file").open("w+") as file:
        file.write("somebody's data")
        file.flush()
        server.join("L")
        server.memory.may_be_woken(file.fileno())
        peer_ranks.wake(server.memory.seat(server.memory.mine))
        file.seek(0)
        assert file.read() == "somebody's data"


def test_without_a_free_file_number_no_seat_is_taken_from_a_rank_that_lives(server):
    with rank(1, "say(ready=True); time.sleep(60)") as process:
        said(process)
        began = process_end.began(process.pid)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            number, runs = server.memory.take(), process_end.runs(process.pid, began)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (number, runs) == (1, True)
        assert not process_end.runs(process.pid, began + 1)
        assert server.memory.seat(0).pid == process.pid
