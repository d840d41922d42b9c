"""The guard's kernel, run by Triton's interpreter, against its reference and a plain count.

The same on a GPU: tests/gpu/test_page_guard_gpu.py.
"""

from __future__ import annotations

import random

import pytest
import torch
import triton.language as tl
from effort import examples
from guard_cases import (
    LAYOUTS,
    POISON,
    Case,
    expected,
    launched,
    lay_out,
    random_case,
    truthful,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.sanitizer.trap_buffer import CELLS, Left
from g4debug.tracers.page_table import check
from g4debug.tracers.page_table import guard as page_guard
from g4debug.tracers.page_table.check import Kind
from g4debug.tracers.page_table.guard import TrapBuffer

pytestmark = [
    pytest.mark.once("Triton is the same with all releases, and the kernels are ours"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernel is compiled here: tests/gpu runs it"
    ),
]
CPU = torch.device("cpu")


def test_the_interpreter_really_runs_the_kernel():
    """Without TRITON_INTERPRET these tests would not test the kernel that a GPU runs."""
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(page_guard._page_guard_kernel, InterpretedFunction)


def run(function, case: Case, trap: TrapBuffer, mailbox: int) -> torch.Tensor:
    cells = case.table.numel()
    memory = torch.full((cells + 4 * page_guard.BLOCK,), POISON, dtype=torch.int32)
    out = memory[:cells].view(case.table.shape)
    function(
        case.table, out, case.seq_lens, case.cu_q, trap, mailbox,
        case.pages, case.page_size, case.window, case.truth,
    )  # fmt: skip
    assert (memory[cells:] == POISON).all()  # nothing behind the table is written
    return out


def agrees(case: Case) -> None:
    safe, bad, short = expected(case)
    seen = set(bad) | {(row, case.table.shape[1], n, int(Kind.SHORT), -1) for row, n in short}
    before = case.table.clone()
    for function in (page_guard.launch, check.reference):
        trap = TrapBuffer(CPU, mailboxes=8)
        out = run(function, case, trap, mailbox=3)
        for (row, column), value in safe.items():
            assert int(out[row, column]) == value
        if function is page_guard.launch:  # it must not touch what nobody reads
            untouched = torch.full(case.table.shape, POISON, dtype=torch.int32)
            for (row, column), value in safe.items():
                untouched[row, column] = value
            assert torch.equal(out, untouched)
        assert trap.tripped == bool(seen)
        left = trap.take()
        assert not trap.tripped
        sure = {cell for cell in seen if cell[3] != Kind.FOREIGN}
        assert {(x.mailbox, x.number) for x in left} == ({(3, 1)} if seen else set())
        assert any(not x.suspicion for x in left) == bool(sure)
        assert len(left) <= 2
        assert int(trap.total) == len(seen)
        for x in left:
            found = tuple(getattr(x.record, f) for f in ("row", "at", "value", "kind", "expected"))
            assert found in (seen - sure if x.suspicion else sure)
            assert x.record.length == int(case.seq_lens[x.record.row])
            kept_as_of_launch(case, x)
        assert trap.merged() == len(seen) - sum(x.record.bad for x in left)
        assert torch.equal(case.table, before)


def kept_as_of_launch(case: Case, left: Left) -> None:
    """What the record says of the launch, and the cells of the row that are kept with it."""
    row, short = left.record.row, left.record.kind == Kind.SHORT
    words = [getattr(left.record, name) for name in ("step", "request", "full")]
    if case.truth is None or case.truth.step is None:
        assert words == [-1, -1, -1]
        assert left.cells.size == 0
        return
    column, slot = left.record.at, int(case.truth.req_pool_indices[row])
    full = -1 if short else page_then(case, row, column)
    assert words == [int(case.truth.step), slot, full]
    origin = 0 if short else column // CELLS * CELLS
    used = min(-(-int(case.seq_lens[row]) // case.page_size), case.table.shape[1])
    values = case.table[row, origin : min(used, origin + CELLS)].to(torch.int32).tolist()
    assert left.cells[0, : len(values)].tolist() == values
    if not short and left.record.expected >= 0:
        assert int(left.cells[1, column - origin]) == left.record.expected


def page_then(case: Case, row: int, column: int) -> int:
    """The full page that the copy has for a cell, -1 for none."""
    slot, rows = int(case.truth.req_pool_indices[row]), case.truth.req_to_token
    there = 0 < slot < rows.shape[0] and column < rows.shape[1]
    if not there or int(case.seq_lens[row]) <= case.truth.padding:
        return -1
    token = int(rows[slot, column])
    return token // case.page_size if token >= 0 else -1


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9))
def test_any_table_with_the_truth_of_its_launch(seed, rows, columns):
    """The copy says the same as the live tables would have said then."""
    case = truthful(random.Random(seed), rows, columns)
    if case.truth.swa and case.truth.shadow is None:
        return  # there is no copy of the mapping
    agrees(launched(case))


@pytest.mark.parametrize("seed", range(3))
def test_wide_tables_with_the_truth_of_their_launch(seed):
    for rng in (random.Random(seed + 10 * n) for n in range(4)):
        case = truthful(rng, 2, 300, bad=0.01)
        if not case.truth.swa or case.truth.shadow is not None:
            agrees(launched(case))


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 4), st.integers(0, 9), st.sampled_from([0.0, 0.2]))
def test_any_table(seed, rows, columns, bad):
    agrees(random_case(random.Random(seed), rows, columns, bad))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9))
def test_any_table_with_a_truth(seed, rows, columns):
    agrees(truthful(random.Random(seed), rows, columns))


@pytest.mark.parametrize("seed", range(3))
def test_wide_tables_with_a_truth(seed):
    agrees(truthful(random.Random(seed), 2, 300, bad=0.01))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [255, 256, 257, 600])
def test_rows_wider_than_a_block(layout, columns):
    rng = random.Random(columns)
    table = torch.tensor(
        [[rng.randrange(50) for _ in range(columns)] for _ in range(2)], dtype=torch.int32
    )
    for column in (0, 254, columns - 1):
        table[1, column] = 50
    lengths = torch.tensor([columns * 4, columns * 4 - 3])
    for window in (-1, 7, 4 * (columns - 250)):
        agrees(Case(lay_out(table, layout), lengths, None, 50, 4, window))


def one_bad(value: int = 99) -> Case:
    table = torch.tensor([[1, 2, 3], [4, value, 6]], dtype=torch.int32)
    return Case(table, torch.tensor([48, 48]), None, 10, 16, -1)


@pytest.mark.parametrize("function", [page_guard.launch, check.reference])
def test_a_record_stands_until_it_was_read(function):
    trap = TrapBuffer(CPU, mailboxes=4)
    run(function, one_bad(99), trap, 1)
    out = run(function, one_bad(77), trap, 1)
    assert int(out[1, 1]) == 0  # the later table is made safe all the same
    (left,) = trap.take()
    assert (left.mailbox, left.number) == (1, 1)
    assert (left.record.row, left.record.at, left.record.value) == (1, 1, 99)
    assert trap.merged() == 1  # 77 was counted
    assert not trap.tripped
    assert trap.take() == []
    run(function, one_bad(77), trap, 1)
    assert trap.tripped
    (left,) = trap.take()
    assert (left.number, left.record.value) == (2, 77)
    assert trap.merged() == 1


@pytest.mark.parametrize("function", [page_guard.launch, check.reference])
def test_watch_gives_sglangs_own_table_when_it_may_only_report(function):
    """A guard in a CUDA graph was launched when watch still corrected."""
    trap, case = TrapBuffer(CPU), one_bad(99)
    for got, reports in ((0, False), (99, True)):
        if reports:
            trap.report_only()
        out = torch.full_like(case.table, POISON)
        function(
            case.table, out, case.seq_lens, None, trap, 1, case.pages, case.page_size, -1, None,
            False, True,
        )  # fmt: skip
        assert out.tolist() == [[1, 2, 3], [4, got, 6]]
        assert [x.record.value for x in trap.take()] == [99]


@pytest.mark.parametrize("function", [page_guard.launch, check.reference])
def test_slots_do_not_disturb_each_other(function):
    trap = TrapBuffer(CPU, mailboxes=5)
    mailboxes = [trap.new_mailbox() for _ in range(3)]
    assert mailboxes == [1, 2, 3]
    run(function, one_bad(99), trap, 2)
    run(function, one_bad(5), trap, 1)  # 5 is a good page
    run(function, one_bad(88), trap, 3)
    assert [(x.mailbox, x.record.value) for x in trap.take()] == [(2, 99), (3, 88)]


def test_more_launches_than_slots_share_the_last_one():
    trap = TrapBuffer(CPU, mailboxes=4)
    assert [trap.new_mailbox() for _ in range(5)] == [1, 2, 3, 3, 3]
    run(page_guard.launch, one_bad(), trap, 3)
    assert [x.mailbox for x in trap.take()] == [3]


def test_query_lengths_come_from_their_running_sum():
    # Window 15, 64 tokens: only the first of 17 queries sees column 2 (tokens 32..47).
    table = torch.tensor([[1, 1, 1, 1], [1, 1, 99, 1]], dtype=torch.int32)
    lengths = torch.tensor([64, 64], dtype=torch.int32)
    for queries, tripped in (([17, 1], False), ([1, 17], True)):
        case = Case(table, lengths, torch.tensor(queries, dtype=torch.int32), 10, 16, 15)
        trap = TrapBuffer(CPU)
        run(page_guard.launch, case, trap, 1)
        assert trap.tripped is tripped
        agrees(case)


def test_the_kernel_reads_no_global_constants():
    """Triton compares each of them at every launch, which was a quarter of the host's time."""
    function = page_guard._page_guard_kernel.fn
    names = function.__code__.co_names
    constants = [n for n in names if isinstance(function.__globals__.get(n), tl.constexpr)]
    assert constants == []
