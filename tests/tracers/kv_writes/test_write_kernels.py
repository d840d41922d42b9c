"""kv-writes' kernels, run by Triton's interpreter, against their reference and a plain count.

The same on a GPU: tests/gpu/test_kv_writes_gpu.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from write_cases import SUSPICIONS, Case, expected, random_case

from g4debug.sanitizer.trap_buffer import TrapBuffer
from g4debug.tracers.kv_writes import kernels
from g4debug.tracers.kv_writes.check import (
    Kind,
    Rows,
    Stamps,
    check_writes,
    reference,
)

pytestmark = [
    pytest.mark.once("what it tests is the same code on every release"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernel is compiled here: tests/gpu runs it"
    ),
]
CPU = torch.device("cpu")
POISON = -77


def test_the_interpreter_really_runs_the_kernels():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(kernels._write_kernel, InterpretedFunction)
    assert isinstance(kernels._stamp_kernel, InterpretedFunction)


def run(function, case: Case, stamps: Stamps, repair: bool) -> tuple[torch.Tensor, list]:
    n = case.loc.numel()
    memory = torch.full((n + 2 * kernels.BLOCK,), POISON, dtype=case.loc.dtype)
    trap = TrapBuffer(CPU, mailboxes=8)
    function(case.loc, memory[:n], stamps, trap, 3, case.size, case.rows, case.truth, repair)
    assert (memory[n:] == POISON).all()  # nothing behind the locations is written
    return memory[:n].clone(), trap.take(), int(trap.total)


def agrees(seed: int) -> set[int]:
    rng = random.Random(seed)
    case = random_case(rng)
    repair = rng.random() < 0.5
    bad = expected(case)
    found = check_writes(case.loc, case.slots, case.size, case.rows, case.truth, repair)
    assert {i: int(k) for i, k in enumerate(found.kinds.tolist()) if k} == bad
    stamps = Stamps.new(case.slots, CPU)
    safe, left, total = run(kernels.launch, case, stamps, repair)
    again, left_again, _ = run(kernels.launch, case, stamps, repair)  # the stamps count once
    assert torch.equal(safe, found.safe)
    assert torch.equal(safe, again)
    assert [x.record for x in left] == [x.record for x in left_again]
    assert total == len(bad)
    by_reference = run(reference, case, Stamps.new(case.slots, CPU), repair)
    assert torch.equal(by_reference[0], safe)
    sure = {i for i, kind in bad.items() if kind not in SUSPICIONS}
    step = 7 if case.truth is not None and case.truth.step is not None else -1
    places = {(*case.place[i], bad[i], int(case.loc[i])) for i in bad}
    for records in (left, by_reference[1]):
        assert any(not x.suspicion for x in records) == bool(sure)
        assert bool(records) == bool(bad)
        for x in records:
            assert (x.record.row, x.record.at, x.record.kind, x.record.value) in places
            assert x.suspicion == (x.record.kind in SUSPICIONS)
            i = case.place.index((x.record.row, x.record.at))
            assert x.record.expected == int(found.expected[i])
            assert x.record.full == int(found.full[i])
            assert x.record.twin == int(found.twins[i])
            assert x.record.step == step
    slots_ok = (safe >= 0) & (safe < case.slots)
    assert bool(slots_ok.all())  # whatever was asked for, the pool has it
    if not repair:
        outside = (case.loc < 0) | (case.loc >= case.slots)
        assert torch.equal(safe[~outside], case.loc[~outside])
    return set(bad.values())


@settings(max_examples=examples(150))
@given(st.integers(0, 10**9))
def test_kernel_reference_and_plain_count_agree(seed):
    agrees(seed)


def test_the_cases_have_every_kind():
    seen = set()
    for seed in range(160):
        seen |= set(expected(random_case(random.Random(seed))).values())
    assert seen == {int(k) for k in Kind} - {int(Kind.UNREADABLE)}


def test_in_contain_mode_nobody_elses_kv_is_overwritten():
    """Whatever was certainly wrong goes to its own place, or to slot 0."""
    for seed in range(200):
        case = random_case(random.Random(seed))
        found = check_writes(case.loc, case.slots, case.size, case.rows, case.truth, True)
        for i, kind in expected(case).items():
            to, right = int(found.safe[i]), int(found.expected[i])
            if kind in SUSPICIONS or (kind == Kind.TWICE and right < 0):
                assert to == int(case.loc[i])
            else:
                assert to in (0, right)
                assert to == 0 or kind != Kind.FREED


def test_ranges_only():
    """Where it is not known which token is which, doubles may be anything."""
    loc = torch.tensor([5, 5, -1, 900])
    out = torch.empty_like(loc)
    for function in (kernels.launch, reference):
        trap = TrapBuffer(CPU, mailboxes=8)
        rows = Rows(rows=1, most=4, per_row=4)
        function(loc, out, Stamps.new(64, CPU), trap, 1, 4, rows, None, True)
        assert out.tolist() == [5, 5, 0, 0]
        (left,) = trap.take()
        assert left.record.kind in (Kind.NEGATIVE, Kind.RANGE)
        assert left.record.at == -1


def test_every_token_gets_a_location_whatever_the_rows_say():
    """Locations that no row covers, or beyond the tokens, are copied; nothing else is written."""
    loc = torch.tensor([20, 21, -5, 23, 24])
    for counts, firsts in (([2, 1], [0, 0]), ([3, 900], [0, 0]), ([0, 0], [0, 0])):
        starts = torch.tensor([0, counts[0]])
        rows = Rows(2, 4, torch.tensor(firsts), starts=starts, counts=torch.tensor(counts))
        memory = torch.full((20,), POISON)
        trap = TrapBuffer(CPU, mailboxes=8)
        kernels.launch(loc, memory[:5], Stamps.new(64, CPU), trap, 1, 4, rows, None, True)
        assert memory[:5].tolist() == [20, 21, 0, 23, 24]
        assert (memory[5:] == POISON).all()


def test_a_long_prefill_is_seen_to_its_end():
    n, size = 3 * kernels.BLOCK + 7, 16
    loc = torch.arange(size, size + n)
    starts, counts = torch.tensor([0, 5]), torch.tensor([5, n - 5])
    rows = Rows(2, n - 5, torch.tensor([0, 0]), starts=starts, counts=counts)
    loc[-1] = int(loc[300])
    out = torch.empty_like(loc)
    trap = TrapBuffer(CPU, mailboxes=8)
    kernels.launch(loc, out, Stamps.new(2048, CPU), trap, 1, size, rows, None, True)
    assert int(trap.total) == 2
    record = trap.take()[0].record
    assert record.kind == Kind.TWICE
    assert {record.at + 5, record.twin} == {300, n - 1}
