"""The torch check against a count of tokens in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from effort import examples
from guard_cases import LAYOUTS, Case, expected, lay_out, random_case, truthful
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.page_table.check import Kind, check_page_table

pytestmark = pytest.mark.once("the code is ours alone")


def check(case: Case):
    return check_page_table(
        case.table, case.seq_lens, case.pages, case.page_size, case.window, case.q_lens, case.truth
    )


def agrees(case: Case) -> None:
    before = case.table.clone()
    got = check(case)
    safe, bad, short = expected(case)
    found = torch.cat([got.bad, got.kinds[:, None], got.expected[:, None]], dim=1)
    assert [tuple(b) for b in found.tolist()] == bad
    assert [tuple(r) for r in got.short.tolist()] == short
    want = torch.zeros(case.table.shape, dtype=case.table.dtype)
    for (row, column), value in safe.items():
        want[row, column] = value
    assert got.safe.dtype == case.table.dtype
    assert torch.equal(got.safe, want)
    assert torch.equal(case.table, before)
    assert got.bad.dtype == got.first_live.dtype == torch.int64


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 9))
def test_any_table(seed, rows, columns):
    agrees(random_case(random.Random(seed), rows, columns, bad=0.25))


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 9))
def test_any_table_with_a_truth(seed, rows, columns):
    agrees(truthful(random.Random(seed), rows, columns))


def table_of(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bad_cell_is_seen_only_where_a_kernel_may_look(layout):
    good = table_of([1, 2, 3, 4])
    # 33 tokens in pages of 16: columns 0, 1, 2 are used; a window of 8 sees 24..32.
    for column, full, sliding in ((0, 1, 0), (1, 1, 1), (2, 1, 1), (3, 0, 0)):
        table = good.clone()
        table[0, column] = 10
        for window, bad in ((-1, full), (8, sliding)):
            case = Case(lay_out(table, layout), torch.tensor([33]), None, 10, 16, window)
            assert len(check(case).bad) == bad, (column, window)
            agrees(case)


def test_the_last_page_of_the_pool_is_the_edge():
    for value, bad in ((-1, 1), (0, 0), (9, 0), (10, 1)):
        case = Case(table_of([value]), torch.tensor([1]), None, 10, 16, -1)
        assert len(check(case).bad) == bad


@pytest.mark.parametrize(("tokens", "bad"), [(16, 0), (17, 1), (32, 1)])
def test_a_page_counts_from_its_first_token_on(tokens, bad):
    case = Case(table_of([1, 99]), torch.tensor([tokens]), None, 10, 16, -1)
    assert len(check(case).bad) == bad


def test_earlier_queries_of_a_row_see_further_back():
    # 64 tokens, window 15: the last query sees 48..63, the first of 17 sees 32..63.
    table = table_of([1, 99, 99, 1])
    one = Case(table, torch.tensor([64]), None, 10, 16, 15)
    many = Case(table, torch.tensor([64]), torch.tensor([17]), 10, 16, 15)
    assert check(one).bad.tolist() == []
    assert check(many).bad.tolist() == [[0, 2, 99]]


def test_no_rows_and_no_columns():
    for shape in ((0, 0), (0, 5), (3, 0)):
        table = torch.zeros(shape, dtype=torch.int32)
        got = check_page_table(table, torch.full((shape[0],), 40), 4, 16, 8)
        assert got.bad.shape == (0, 3)
        assert got.safe.shape == shape


def test_the_random_cases_have_every_kind_in_them_and_sound_ones():
    rng, kinds, sound = random.Random(1), set(), 0
    for _ in range(400):
        case = truthful(rng, rng.randint(1, 5), rng.randint(1, 8))
        _, bad, short = expected(case)
        kinds |= {(b[3], case.truth.swa) for b in bad}
        sound += not bad and not short
    assert kinds == {
        (int(k), swa)
        for k in Kind
        for swa in (False, True)
        if k not in (Kind.SHORT, Kind.EVICTED) and k < Kind.UNREADABLE
    } | {(int(Kind.EVICTED), True)}
    assert sound > 50
