"""The hand-over of the guard's records: none lost, none torn, whatever comes in between.

The writers take the same steps as the guard's kernel; hypothesis decides who takes the next one.
The same with real kernels, streams and CUDA graphs: tests/gpu/test_trap_buffer_gpu.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from real_backend import Rig

from g4debug.findings.steps import Recorder
from g4debug.sanitizer import trap_buffer
from g4debug.sanitizer.trap_buffer import Left, Record, TrapBuffer
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.checked_table import cell_of
from g4debug.tracers.page_table.report import describe
from g4debug.tracers.page_table.tracer import PageTableTracer

pytestmark = pytest.mark.once("Triton is the same with all releases, and the kernels are ours")

CPU = torch.device("cpu")
MAILBOXES = 3


def record(number: int) -> Record:
    """Words of a record that belong together: a mixture of two of them shows."""
    times = (1, 2, 3, 5, 0, 7, 11, 13, 17, 19, 23)
    return Record(*(t * number if t else 1 + number % 3 for t in times))


def cells_of(number: int) -> np.ndarray:
    """The cells of the row that belong to it."""
    return np.full((2, trap_buffer.CELLS), number, dtype=np.int32)


def whole(left: Left) -> int:
    """The number of the record that the words and the cells are of."""
    number = left.record.row
    assert left.record == record(number)
    assert (left.cells == cells_of(number)).all()
    return number


def test_with_live_tables_there_are_no_cells():
    trap = TrapBuffer(CPU, mailboxes=MAILBOXES)
    trap.leave(1, Record(*record(1)[:7]))
    (left,) = trap.take()
    assert left.cells.shape == (2, 0)


@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=300))
def test_any_order_of_steps_loses_nothing_and_tears_nothing(order):
    trap = TrapBuffer(CPU, mailboxes=MAILBOXES)
    writers = {}
    written = cells = 0
    seen: list[int] = []

    def look():
        if trap.tripped:
            seen.extend(whole(left) for left in trap.take())

    for who, host in order:
        if host:
            look()
            continue
        if who not in writers:
            written += 1
            cells += record(written).bad
            # Half of them are suspicions, which have a place of their own.
            writers[who] = trap.leaving(
                1 + who % 2 + MAILBOXES * (who % 4 > 1), record(written), cells_of(written)
            )
        if next(writers[who], "done") == "done":
            del writers[who]
    for writer in writers.values():
        for _ in writer:
            pass
    look()
    assert not trap.tripped
    assert len(seen) == len(set(seen))  # each once
    assert set(seen) <= set(range(1, written + 1))
    told = sum(record(n).bad for n in seen)
    assert trap.told == told
    assert told + trap.merged() == cells  # none is lost
    assert bool(seen) == bool(written)  # and where there was something, there is a record
    assert not trap.spoilt
    for mailbox in (1, 2):  # and the next one has a place again
        trap.leave(mailbox, record(1000 + mailbox), cells=cells_of(1000 + mailbox))
    assert [whole(left) for left in trap.take()] == [1001, 1002]


def test_a_writer_that_has_not_finished_is_waited_for():
    trap = TrapBuffer(CPU, mailboxes=MAILBOXES)
    slow = trap.leaving(1, record(1), cells_of(1))
    for _ in range(5):  # it has claimed its place and written some words
        next(slow)
    trap.leave(1, record(2))  # another one finds it taken
    assert trap.tripped
    assert trap.take() == []  # nothing is there to be read yet, and nothing is cleared
    for _ in slow:
        pass
    assert trap.tripped
    assert [whole(left) for left in trap.take()] == [1]
    assert trap.merged() == record(2).bad


def test_memory_that_somebody_else_wrote_to_is_said_and_left_alone():
    trap = TrapBuffer(CPU, mailboxes=MAILBOXES)
    trap.host[2 * trap_buffer.WORDS + trap_buffer.SEQ] = 77
    trap.leave(1, record(1))
    assert [left.mailbox for left in trap.take()] == [1]
    assert trap.spoilt == {2}
    trap.leave(1, record(2))
    assert [left.mailbox for left in trap.take()] == [1]


GARBAGE = (0, -1, 5, 8, 9, 10**6, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("other", GARBAGE)
def test_the_fallback_survives_any_words(kind, other):
    words = Record(*[other] * len(Record._fields))._replace(kind=kind)
    left = Left(1, False, 1, words, trap_buffer.NO_CELLS)
    finding, table, events = describe(None, cell_of(words), left, Recorder(4), False, None)
    assert (table, events) == (None, ())
    assert finding.headline.startswith("g4debug: page-table")
    readable = kind in {int(k) for k in Kind if k is not Kind.UNREADABLE}
    assert (finding.kind == "unreadable") is not readable
    assert finding.site == ""  # whose table it was is not known
    if not readable:
        assert finding.expected.endswith("one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13")
        assert str(kind) in finding.headline
        assert "not known" in finding.cause


def test_a_record_that_makes_no_sense_does_not_end_the_poll(arm, monkeypatch, caplog):
    """In log mode the poll goes on, and finds what comes next."""
    tracers = []
    install = PageTableTracer.install
    monkeypatch.setattr(
        PageTableTracer, "install", lambda self: (tracers.append(self), install(self))[1]
    )
    arm(G4DEBUG_TRACE="page-table", G4DEBUG_MODE="log")
    rig = Rig()
    backend = rig.backend()
    requests = [rig.admit("a", 50)]
    rig.step(backend, "decode", requests)
    (tracer,) = tracers
    tracer.trap.leave(1, Record(0, 0, 0, 0, 1, 0, 0))
    tracer.poll()
    assert any("cannot be read (kind 0, row 0, column 0)" in m for m in caplog.messages)
    batch = rig.batch("decode", requests, backend)
    backend.init_forward_metadata(batch)
    backend.forward_metadata.page_table[0, 2] = 10**6
    rig.forward(backend, batch)
    assert any("gets page 1000000" in m for m in caplog.messages)
    assert not any("now off in this process" in m for m in caplog.messages)
