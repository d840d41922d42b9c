"""Hashes that are made later are those that would have been made at once, whoever reads when."""

from __future__ import annotations

import sys
import threading
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from g4debug.findings import tape
from g4debug.findings.tape import How, Ring, Why
from g4debug.tracers.flight_recorder import due_hashes
from g4debug.tracers.flight_recorder.due_hashes import MANY, DueHashes, Live

KEY = bytes(32)
TOKENS = st.lists(st.integers(0, 200_000), max_size=150)


def ring() -> Ring:
    made = Ring(1 << 30)
    made.start(Why.START, 0, tape.start(0, 0, 0, 0, 0.5, 0))
    return made


def hashes(page: int, firsts: bool) -> DueHashes:
    made = DueHashes(KEY)
    made.page, made.firsts = page, firsts
    return made


def event(prompt: int) -> bytes:
    return tape.request(1, prompt, 9, 0, -1, 0)


@given(
    page=st.sampled_from((1, 4, 16, 64)),
    firsts=st.booleans(),
    salt=st.sampled_from(("", "tenant")),
    served=st.lists(st.tuples(TOKENS, TOKENS), max_size=4),
    made=st.booleans(),
)
def test_they_are_those_that_would_have_been_made_at_once(
    page: int,
    firsts: bool,
    salt: str,
    served: list[tuple[list[int], list[int]]],
    made: bool,
) -> None:
    now, due, wanted = ring(), hashes(page, firsts), b""
    for n, (prompt, output) in enumerate(served, 1):
        live = Live(n, len(prompt), salt)
        due.request(now, event(len(prompt)), live, prompt)
        if made:
            due.make()
        given = array("q", output)
        due.end(now, live, given, How.LENGTH)
        given[:] = array("q", [7] * len(given))  # it is SGLang's, which may go on with it
        chain = tape.Chain(KEY, page, firsts, salt)
        raw = tape.packed(prompt)
        wanted += event(len(prompt)) + chain.feed_packed(raw)
        rest = raw[4 * chain.done :] + tape.packed(output)
        wanted += tape.end(n, len(output), How.LENGTH, len(prompt))
        wanted += chain.feed_packed(rest, len(prompt))
    (whole,) = due.chunks(now)
    assert whole.endswith(wanted)
    assert len(whole) == len(bytes(now.now)) == len(ring().now) + len(wanted)
    assert whole == bytes(now.now)  # they are on the tape itself, too


def drive(due: DueHashes, now: Ring, count: int) -> None:
    """Requests that come, end, and get their hashes."""
    for n in range(1, count + 1):
        live = Live(n, 40 + n % 7)
        due.request(now, event(live.prompt), live, [n] * live.prompt)
        if n % 3:
            due.make()
        due.end(now, live, [n] * 20, How.STOP)


def test_whoever_interrupts_it_reads_a_part_of_the_same_tape() -> None:
    """A signal handler may come in front of each line."""
    now, due = ring(), hashes(16, True)
    read: list[bytes] = []

    def interrupt(frame: Any, what: str, arg: object) -> Any:
        if frame.f_code.co_filename != due_hashes.__file__:
            return None
        if what == "line":
            sys.settrace(None)
            read.append(b"".join(due.chunks(now)))
            sys.settrace(interrupt)
        return interrupt

    old = sys.gettrace()
    sys.settrace(interrupt)
    try:
        drive(due, now, 4)
    finally:
        sys.settrace(old)
    (whole,) = due.chunks(now)
    calm = ring()
    drive(other := hashes(16, True), calm, 4)
    assert [whole] == other.chunks(calm)
    assert len(read) > 60
    assert len({len(one) for one in read}) == 1 + 8  # before the first event, and behind each
    assert all(whole.startswith(one) for one in read)


def test_another_thread_reads_a_part_of_the_same_tape() -> None:
    now, due = ring(), hashes(16, True)
    read: list[bytes] = []
    over = threading.Event()

    def reader() -> None:
        while not over.is_set():
            read.append(b"".join(due.chunks(now)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=reader)
    thread.start()
    try:
        drive(due, now, 1500)
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)
    (whole,) = due.chunks(now)
    calm = ring()
    drive(other := hashes(16, True), calm, 1500)
    assert [whole] == other.chunks(calm)
    assert all(whole.startswith(one) for one in read)


def test_they_are_made_although_no_step_comes() -> None:
    now, due = ring(), hashes(16, False)
    lives = [Live(n, 20) for n in range(1, MANY + 2)]
    for live in lives:
        due.request(now, event(20), live, [live.id] * 20)
    assert [live.hashed is None for live in lives] == [False] * MANY + [True]


def test_a_chunk_that_was_dropped_gets_them_all_the_same() -> None:
    """Its request may still run."""
    now, due = ring(), hashes(16, False)
    live = Live(1, 20)
    due.request(now, event(20), live, [3] * 20)
    now.start(Why.FLUSH, 9, tape.start(9, 9, 1, 0, 0.5, 0))
    now.forget()
    due.end(now, live, [3] * 20, How.LENGTH)
    (chunk,) = due.chunks(now)
    chain = tape.Chain(KEY, 16, False)
    chain.feed([3] * 20)
    assert chunk.endswith(chain.feed([3] * (20 - chain.done) + [3] * 20, 20))
