"""What a finding does, in each mode; and that nothing keeps it from being reported."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from g4debug.dumps import reading, writing
from g4debug.dumps.calling import program
from g4debug.findings import tape
from g4debug.findings.record import Evidence, Finding, Location, Pool, Step, Table, TrapRecord
from g4debug.findings.steps import Recorder
from g4debug.findings.tape import Code, Why
from g4debug.findings.tape_record import data, pack
from g4debug.settings import Settings
from g4debug.trapping import trap
from g4debug.trapping.describe import Describer, geometry, located
from g4debug.trapping.trap import Trap, TrapError, cut_out

POOL = Pool("swa", 10, 16, 144)


def finding(**location) -> Finding:
    where = {"layer_kind": "full", "forward_mode": "DECODE", "runner": "draft", **location}
    return Finding(
        check="page-table",
        kind="out-of-range",
        site="attn.trtllm_mha.layer_page_table",
        headline="g4debug: page-table: page 99 in row 1",
        location=Location(**where),
        expected="a page of the swa pool",
        got="99",
        cause="a cause",
    )


def table(rows=2, columns=4, row=1, column=2) -> Table:
    values = np.ones((rows, columns), dtype=np.int64)
    values[row, column] = 99
    return Table(
        values=values,
        seq_lens=np.full(rows, columns * 16),
        first_live=np.zeros(rows, dtype=np.int64),
        bad=np.array([[row, column, 99]]),
        pool=POOL,
        rows_total=rows,
        columns_total=columns,
        rids=tuple(f"r{i}" for i in range(rows)),
    )


def make(tmp_path, describe=None, **settings) -> Trap:
    settings = Settings(**{"debug": True, "debug_dir": tmp_path / "dumps", **settings})
    return Trap(settings, describe or Describer(Recorder(4)))


def dumps(tmp_path):
    return sorted((tmp_path / "dumps").glob("*"))


def caught(trap: Trap, found: Finding, table: Table | None = None) -> TrapError:
    with pytest.raises(TrapError) as error:
        trap.report(found, Evidence(table=table))
    assert str(error.value).startswith("g4debug: page-table: page 99 in row 1\n")
    return error.value


def test_raise_mode_raises_with_a_dump(tmp_path, caplog):
    error = caught(make(tmp_path), finding(), table())
    assert error.path == dumps(tmp_path)[0]
    record = reading.read(error.path)
    assert error.finding == finding()
    assert record.finding == located(finding(), Recorder(4))
    assert record.finding.location.host
    assert record.table.bad.tolist() == [[1, 2, 99]]
    text = str(error)
    for part in ("expected: a page of the swa pool", "got:      99", "likely:   a cause",
                 f"dump:     {error.path}",
                 f"next:     {program()} show {error.path}"):  # fmt: skip
        assert f"\n  {part}" in text
    assert caplog.records[0].getMessage() == text
    assert caplog.records[0].levelno == logging.ERROR


def test_raise_mode_raises_each_time(tmp_path):
    trap = make(tmp_path)
    for number in (1, 2, 3):
        assert caught(trap, finding()).path.name.rsplit("-", 2)[1] == str(number)
    assert len(dumps(tmp_path)) == 3


@pytest.mark.parametrize("mode", ["contain", "log"])
def test_the_other_modes_dump_a_kind_once_and_log_at_powers_of_ten(tmp_path, caplog, mode):
    trap = make(tmp_path, mode=mode)
    logged = []
    for number in range(1, 121):
        caplog.clear()
        trap.report(finding(row=number), Evidence(table=table()))
        if caplog.records:
            logged.append(number)
            assert caplog.records[0].getMessage().startswith("g4debug: page-table")
            assert (f"seen {number} times" in caplog.text) is (number > 1)
    assert logged == [1, 10, 100]
    assert len(dumps(tmp_path)) == 1
    for other in ({"layer_kind": "sliding"}, {"forward_mode": "EXTEND"}, {"runner": "target"}):
        trap.report(finding(**other))
    assert len(dumps(tmp_path)) == 4


def test_the_number_of_dumps_is_limited_and_the_finding_is_not(tmp_path):
    trap = make(tmp_path, max_dumps=2)
    assert [caught(trap, finding()).path is not None for _ in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    error = caught(trap, finding())
    assert "G4DEBUG_MAX_DUMPS=2" in error.problem
    assert f"no dump:  {error.problem}" in str(error)
    assert len(dumps(tmp_path)) == 2


def test_a_dump_that_was_asked_for_is_copied_first_and_encoded_later(tmp_path, monkeypatch):
    """The event loop makes the copy; what takes long is left to another thread."""
    encoded, encode = [], writing.encode

    def seen(record):
        encoded.append(threading.get_ident())
        return encode(record)

    monkeypatch.setattr(writing, "encode", seen)
    trap = make(tmp_path, max_dumps=0)
    write = trap.keep(finding())
    assert encoded == []
    assert dumps(tmp_path) == []
    with ThreadPoolExecutor(1) as pool:
        path, problem = pool.submit(write).result()
    assert (problem, trap.written) == ("", 0)  # it is beside the budget
    assert dumps(tmp_path) == [path]
    assert encoded
    assert threading.get_ident() not in encoded


def test_what_cannot_be_described_is_told_to_who_asked(tmp_path):
    def broken(*args):
        raise ValueError("of a broken process")

    assert make(tmp_path, broken).keep(finding())() == (None, "ValueError: of a broken process")


def test_no_dumps_at_all(tmp_path):
    assert "G4DEBUG_MAX_DUMPS=0" in str(caught(make(tmp_path, max_dumps=0), finding()))
    assert dumps(tmp_path) == []


@pytest.mark.parametrize("cell", [(0, 0), (2999, 2999), (1500, 7), (40, 2990)])
def test_a_large_table_is_cut_around_its_bad_cell(tmp_path, cell):
    error = caught(make(tmp_path, max_dump_mb=1), finding(), table(3000, 3000, *cell))
    assert error.path.stat().st_size <= 1 << 20
    got = reading.read(error.path).table
    row, column = cell
    assert got.bad.tolist() == [[row, column, 99]]
    assert int(got.values[row - got.row0, column - got.column0]) == 99
    assert got.rids[row - got.row0] == f"r{row}"
    assert (got.rows_total, got.columns_total) == (3000, 3000)
    assert len(got.seq_lens) == len(got.first_live) == len(got.rids) == len(got.values)


def test_a_cut_of_a_table_without_bad_cells_or_with_many():
    plain = dataclasses.replace(table(100, 100), bad=np.empty((0, 3), dtype=np.int64))
    assert cut_out(plain, 4, 8).values.shape == (4, 8)
    many = dataclasses.replace(table(100, 100), bad=np.ones((5000, 3), dtype=np.int64))
    assert len(cut_out(many, 4, 8).bad) < 100
    small = cut_out(table(), 64, 64)
    assert np.array_equal(small.values, table().values)


def test_a_dump_that_stays_too_large_says_so(tmp_path):
    def describe(found, evidence):
        return TrapRecord(found, "now", environment={"X": "x" * (2 << 20)}, table=evidence.table)

    error = caught(make(tmp_path, describe, max_dump_mb=1), finding(), table(500, 2000))
    assert "G4DEBUG_MAX_DUMP_MB=1" in error.problem
    assert dumps(tmp_path) == []


@pytest.mark.parametrize("each", [200 << 10, 2 << 20])
def test_a_tape_is_shortened_before_the_rest_is_cut(tmp_path, each):
    """To its newest chunks; and left out if even the newest one is too large."""
    chunks = [
        bytes((Code.START, Why.IDLE)) + tape.start(0, 0, n, 0, 0.7, 0) + bytes(each)
        for n in range(10)
    ]
    on = pack(chunks, b"", 16, False, 0, 10, {}, {})
    made = TrapRecord(finding(), "now", table=table(), tape=on)
    error = caught(make(tmp_path, lambda f, e: made, max_dump_mb=1), finding(), table())
    got = reading.read(error.path)
    assert error.path.stat().st_size <= 1 << 20
    assert np.array_equal(got.table.values, table().values)
    if each > 1 << 20:
        assert got.tape is None
        return
    kept = len(got.tape.chunks)
    assert kept in (4, 5)
    assert data(got.tape) == b"".join(chunks[-kept:])
    assert (got.tape.begins, got.tape.requests) == ("idle", kept)


def test_steps_are_cut_too(tmp_path):
    steps = tuple(Step(n, "DECODE", ("r" * 200,) * 50, (1,) * 50) for n in range(400))

    def describe(found, evidence):
        return TrapRecord(found, "now", table=evidence.table, steps=steps)

    error = caught(make(tmp_path, describe, max_dump_mb=1), finding(), table())
    assert error.path.stat().st_size <= 1 << 20
    kept = reading.read(error.path).steps
    assert kept == steps[-len(kept) :]
    assert kept


def test_a_dump_that_no_reader_would_take_is_cut(tmp_path):
    """Small enough for G4DEBUG_MAX_DUMP_MB, but of more values than the reader takes."""
    steps = tuple(Step(n, "DECODE", ("r",) * 500, (1,) * 500) for n in range(2500))

    def describe(found, evidence):
        return TrapRecord(found, "now", table=evidence.table, steps=steps)

    error = caught(make(tmp_path, describe, max_dump_mb=16), finding(), table())
    kept = reading.read(error.path).steps
    assert kept == steps[-len(kept) :]
    assert kept


def test_a_file_in_the_way_of_the_directory(tmp_path):
    (tmp_path / "dumps").write_text("mine")
    error = caught(make(tmp_path), finding(), table())
    assert error.path is None
    assert str(tmp_path / "dumps") in error.problem
    assert (tmp_path / "dumps").read_text() == "mine"


def test_a_directory_that_is_not_ours(nobody):
    folder, run = nobody
    assert run(lambda: caught(make(folder), finding()).path).endswith(".pt")
    (folder / "dumps").chmod(0o500)
    assert "Permission denied" in run(lambda: caught(make(folder), finding()).problem)
    (folder / "dumps").chmod(0o700)


def test_a_directory_that_nobody_can_write(tmp_path):
    error = caught(make(tmp_path, debug_dir=trap.Path("/proc/g4debug")), finding(), table())
    assert error.path is None
    assert "/proc/g4debug" in str(error)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    trap = make(tmp_path)
    error = caught(trap, finding(), table())
    assert "No space left on device" in error.problem
    assert dumps(tmp_path) == []  # no half-written file either
    monkeypatch.undo()
    assert caught(trap, finding(), table()).path is not None  # the failure used up no budget


@pytest.mark.parametrize("mode", ["raise", "contain"])
def test_a_description_that_fails(tmp_path, caplog, mode):
    def describe(found, evidence):
        raise AttributeError("a bug of ours")

    trap = make(tmp_path, describe, mode=mode)
    if mode == "raise":
        assert "AttributeError: a bug of ours" in caught(trap, finding(), table()).problem
    else:
        trap.report(finding(), Evidence(table=table()))
    assert any(m.startswith("g4debug: page-table: page 99") for m in caplog.messages)


def test_a_dump_says_on_which_host_and_rank_it_was_made(tmp_path):
    """What the tracer knows stays; what it does not know is filled in, if somebody knows it."""
    recorder = Recorder(4)
    args = SimpleNamespace(dp_size=1)
    recorder.attach(SimpleNamespace(dp_rank=None, tp_rank=1, pp_rank=0, server_args=args))
    error = caught(make(tmp_path, Describer(recorder)), finding(pid=7, rank=3))
    at = reading.read(error.path).finding.location
    assert (at.host, at.pid, at.dp_rank, at.rank, at.pp_rank) == (platform.node(), 7, 0, 3, 0)
    error = caught(make(tmp_path, Describer(Recorder(4))), finding())
    at = reading.read(error.path).finding.location
    assert (at.host, at.pid, at.dp_rank, at.rank) == (platform.node(), os.getpid(), -1, -1)


def test_the_geometry_is_plain_values():
    class Scheduler:
        class model_config:
            context_len = 2048
            head_dim = object()

    assert geometry(Scheduler) == {"context_len": 2048}
    assert geometry(None) == {}
