"""The guard of token lists: its kernel in Triton's interpreter, its reference, and a plain count.

The same on a GPU: tests/gpu/test_token_guard_gpu.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import triton.language as tl
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from list_cases import ListCase, expected, list_case, rows_of

from g4debug.backends.handed_over import TokenLists
from g4debug.sanitizer.trap_buffer import CELLS, TrapBuffer
from g4debug.tracers.page_table import token_check, token_guard
from g4debug.tracers.page_table.check import Kind, Truth
from g4debug.tracers.page_table.token_check import Repair

pytestmark = [
    pytest.mark.once("Triton is the same with all releases, and the kernels are ours"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the kernel is compiled here: tests/gpu runs it"
    ),
]
CPU = torch.device("cpu")
FUNCTIONS = (token_guard.launch, token_check.reference)


def test_the_interpreter_really_runs_the_kernel():
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(token_guard._token_guard_kernel, InterpretedFunction)


def agrees(case: ListCase, repair: Repair = Repair.ALL) -> None:
    bad, words = expected(case)
    seen, mended = set(bad) | set(words), []
    for function in FUNCTIONS:
        mine, trap = case.copy(), TrapBuffer(CPU, mailboxes=8)
        trap.keep_cells(3)
        function(mine.lists, trap, 3, case.tokens, case.page_size, mine.truth, repair)
        left = trap.take()
        sure = {b for b in seen if b[3] != Kind.FOREIGN}
        assert trap.total == len(seen)
        assert any(not x.suspicion for x in left) == bool(sure)
        assert any(x.suspicion for x in left) <= bool(seen - sure)
        for x in left:
            found = tuple(getattr(x.record, f) for f in ("row", "at", "value", "kind", "expected"))
            assert found in (seen - sure if x.suspicion else sure)
            row = x.record.row
            tokens, first, begin = rows_of(case)[row]
            assert x.record.length == tokens
            if found in bad:
                origin = x.record.at // CELLS * CELLS
                entries = case.lists.indices[begin : begin + tokens - first]
                kept = entries[origin : origin + CELLS].to(torch.int32).tolist()
                assert x.cells[0, : len(kept)].tolist() == kept
                assert x.cells[1, x.record.at - origin] == x.record.expected
        mended.append(mine.lists)
    for name in ("indices", "indptr", "splits", "offsets", "mask_starts"):
        a, b, before = (getattr(x, name) for x in (*mended, case.lists))
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b), name
            assert torch.equal(a, before) or (repair and seen)
    if repair is Repair.RANGES:
        only_what_leads_outside(case, mended[0])
    elif repair:
        is_safe(case, mended[0])
    if repair is Repair.ALL:
        harmless(case, mended[0], {b[:2] for b in bad if b[3] == Kind.FOREIGN})


def is_safe(case: ListCase, lists: TokenLists) -> None:
    """A kernel can read it all."""
    ends = lists.indptr.tolist()
    assert ends == sorted(ends)
    assert ends[0] == 0
    assert ends[-1] <= len(lists.indices)
    read = lists.indices[: ends[-1]]
    assert ((read >= 0) & (read < case.tokens)).all()
    if lists.splits is not None:
        for (tokens, _, _), splits in zip(rows_of(case), lists.splits.tolist(), strict=False):
            assert not tokens or 1 <= splits <= lists.max_splits
    if lists.mask_starts is not None:
        for (n, _, _), start in zip(rows_of(case), lists.mask_starts.tolist(), strict=False):
            needs = lists.queries * (n + lists.queries)
            assert start >= 0
            assert start + needs <= lists.mask_size or start == 0


def leaves(lists: TokenLists) -> bool:
    ends = lists.indptr.tolist()
    return ends != sorted(ends) or ends[0] < 0 or ends[-1] > len(lists.indices)


def outside_of_the_mask(lists: TokenLists, row: int) -> bool:
    """A kernel reads a cell for each query of a row and each entry, and for its own tokens."""
    begin, end = lists.indptr[row : row + 2].tolist()
    offset = 0 if lists.offsets is None else int(lists.offsets[row])
    line, start = offset + end - begin + lists.queries, int(lists.mask_starts[row])
    return not 0 <= start <= start + lists.queries * line <= lists.mask_size or offset < 0


def only_what_leads_outside(case: ListCase, lists: TokenLists) -> None:
    """A kernel stays in its memory, and what would not have led it out of it is as it was."""
    was = case.lists
    assert not leaves(lists)
    begin, end = lists.indptr[0], lists.indptr[-1]
    read = lists.indices[begin:end]
    assert ((read >= 0) & (read < case.tokens)).all()
    changed = lists.indices != was.indices
    assert (lists.indices[changed] == 0).all()
    assert ((was.indices[changed] < 0) | (was.indices[changed] >= case.tokens)).all()
    if not leaves(was):
        assert torch.equal(lists.indptr, was.indptr)
    if was.splits is not None:
        assert torch.equal(lists.splits, was.splits)
    for row in range(was.rows if was.mask_starts is not None else 0):
        here = dataclasses.replace(was, indptr=lists.indptr)
        if not outside_of_the_mask(here, row):
            assert lists.mask_starts[row] == was.mask_starts[row]
            assert lists.offsets[row] == was.offsets[row]
        assert not outside_of_the_mask(lists, row) or lists.mask_starts[row] == 0


def harmless(case: ListCase, lists: TokenLists, foreign: set[tuple[int, int]]) -> None:
    """Entries that are still wrong cannot be mended: no page is right, or the list is too short."""
    again = ListCase(lists, case.tokens, case.page_size, case.truth)
    bad, words = expected(again)
    for row, entry, value, kind, _ in bad:
        gone = kind in (Kind.FREED, Kind.EVICTED, Kind.ZERO, Kind.MISMATCH, Kind.FOREIGN)
        assert gone
        assert value == 0 or (row, entry) in foreign or kind == Kind.FOREIGN
    assert {w[3] for w in words} <= {Kind.SHORT, Kind.MASK, Kind.INDPTR}


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.sampled_from(list(Repair)),
    st.sampled_from([0.0, 0.03, 0.2]),
)  # fmt: skip
def test_any_lists(seed, rows, columns, repair, bad):
    agrees(list_case(random.Random(seed), rows, columns, bad), repair)


@pytest.mark.parametrize("seed", range(3))
def test_lists_longer_than_a_block(seed, monkeypatch):
    monkeypatch.setattr(token_guard, "PROGRAMS", 4)  # so that one program has several blocks
    rng = random.Random(seed)
    case = list_case(rng, 2, 3000 // 16, bad=0.003)
    while case.page_size > 16:
        case = list_case(rng, 2, 3000 // 16, bad=0.003)
    agrees(case)


def test_the_random_cases_have_every_kind_in_them_and_sound_ones():
    rng, kinds, sound = random.Random(1), set(), 0
    for _ in range(300):
        bad, words = expected(list_case(rng, rng.randint(1, 4), rng.randint(1, 5)))
        kinds |= {b[3] for b in (*bad, *words)}
        sound += not bad and not words
    assert kinds == {int(k) for k in Kind} - {Kind.UNREADABLE}
    assert sound > 20


def small(indptr: list[int], lengths: list[int], indices: list[int]) -> ListCase:
    lists = TokenLists(
        torch.tensor(indices), torch.tensor(indptr, dtype=torch.int32), torch.tensor(lengths)
    )
    return ListCase(lists, 100, 1, None)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("indptr", [[0, 10**9, 5], [-(10**9), 3, 5], [0, 5, 3], [1, 3, 5]])
def test_a_broken_indptr_does_not_lead_the_guard_out_of_the_list(function, indptr):
    case, trap = small(indptr, [3, 2], [1, 2, 3, 4, 5]), TrapBuffer(CPU)
    function(case.lists, trap, 1, 100, 1, None, Repair.UNSAFE)
    (left,) = trap.take()
    assert left.record.kind == Kind.INDPTR
    assert case.lists.indptr.tolist() == [0, 3, 5]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("indptr", "after"),
    [
        ([0, 2, 5], [0, 2, 5]),  # another idea of the lengths, and all of it is in the list
        ([1, 3, 5], [1, 3, 5]),
        ([0, 4, 6], [0, 4, 6]),
        ([0, 5, 3], [0, 3, 5]),
        ([0, 3, 7], [0, 3, 5]),
        ([0, 10**9, 5], [0, 3, 5]),
        ([-1, 3, 5], [0, 3, 5]),
    ],
)
def test_watch_changes_an_indptr_only_where_a_kernel_would_leave_the_list(function, indptr, after):
    case, trap = small(indptr, [3, 2], [1, 2, 3, 4, 5, 10**8]), TrapBuffer(CPU)
    function(case.lists, trap, 1, 100, 1, None, Repair.RANGES)
    (left,) = trap.take()
    assert left.record.kind == Kind.INDPTR
    assert case.lists.indptr.tolist() == after
    # Where that leads behind the lengths, the garbage there is read, too.
    assert case.lists.indices.tolist() == [1, 2, 3, 4, 5, 0 if after[-1] == 6 else 10**8]


def verified(offsets: list[int], starts: list[int], splits: list[int]) -> ListCase:
    """Two rows of a window of 2, of 3 and 2 tokens, with 2 queries each: masks of 10 and 8."""
    case = small([0, 2, 4], [3, 2], [1, 2, 3, 4])
    lists = dataclasses.replace(
        case.lists, window=2, splits=torch.tensor(splits), max_splits=8,
        offsets=torch.tensor(offsets), mask_starts=torch.tensor(starts), mask_size=18, queries=2,
    )  # fmt: skip
    return dataclasses.replace(case, lists=lists)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("given", "after"),
    [
        (([0, 0], [0, 10]), ([0, 0], [0, 10])),  # another offset, but inside of the mask
        (([1, 0], [2, 9]), ([1, 0], [2, 9])),
        (([1, 1], [0, 10]), ([1, 0], [0, 10])),
        (([-1, 0], [0, 10]), ([1, 0], [0, 10])),
        (([1, 0], [0, 11]), ([1, 0], [0, 10])),
        (([2**62, 0], [2**62, 10]), ([1, 0], [0, 10])),
    ],
)
def test_watch_changes_a_mask_only_where_a_kernel_would_leave_it(function, given, after):
    case, trap = verified(*given, splits=[0, 99]), TrapBuffer(CPU)
    function(case.lists, trap, 1, 100, 1, None, Repair.RANGES)
    assert trap.tripped
    assert (case.lists.offsets.tolist(), case.lists.mask_starts.tolist()) == after
    assert case.lists.splits.tolist() == [0, 99]  # told; a kernel reads less by it, and not more


@pytest.mark.parametrize("function", FUNCTIONS)
def test_watch_changes_nothing_when_it_may_only_report(function):
    """A guard in a CUDA graph was launched when watch still corrected."""
    case, trap = small([0, 10**9, -5], [3, 2], [1, -2, 3, 400, 5]), TrapBuffer(CPU)
    before = case.copy()
    trap.report_only()
    function(case.lists, trap, 1, 100, 1, None, Repair.RANGES)
    assert trap.total == 4
    assert torch.equal(case.lists.indices, before.lists.indices)
    assert torch.equal(case.lists.indptr, before.lists.indptr)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("length", [10**9, -(10**9), 2**31 - 1])
def test_broken_lengths_do_not_lead_the_guard_out_of_the_list(function, length):
    case, trap = small([0, 3, 5], [3, length], [1, 2, 3, 4, 5]), TrapBuffer(CPU)
    truth = Truth(torch.arange(40).view(4, 10), torch.tensor([1, 2]))
    function(case.lists, trap, 1, 100, 1, truth, Repair.UNSAFE)
    assert trap.tripped


@pytest.mark.parametrize("function", FUNCTIONS)
def test_in_log_mode_nothing_is_changed(function):
    case, trap = small([0, 4, 5], [3, 2], [1, -2, 3, 400, 5]), TrapBuffer(CPU)
    before = case.copy()
    function(case.lists, trap, 1, 100, 1, None, Repair.NOTHING)
    assert trap.total == 3
    assert torch.equal(case.lists.indices, before.lists.indices)
    assert torch.equal(case.lists.indptr, before.lists.indptr)


def test_the_kernel_reads_no_global_constants():
    """Triton compares each of them at every launch, which was a quarter of the host's time."""
    function = token_guard._token_guard_kernel.fn
    names = function.__code__.co_names
    constants = [n for n in names if isinstance(function.__globals__.get(n), tl.constexpr)]
    assert constants == []
