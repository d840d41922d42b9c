"""The invariants of a speculative step, against what they say in words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    EXTEND,
    IDLE,
    VERIFY,
    check_accepted,
    check_advance,
    check_counts,
    check_rows,
    check_state,
)

STATES = (IDLE, DRAFT, VERIFY, EXTEND, "NgramVerifyInput")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("allowed", [(DRAFT,), (VERIFY,), (DRAFT, IDLE)])
def test_only_what_is_allowed_passes(state, allowed):
    violation = check_state(state, "T", allowed)
    assert (violation is None) == (state in allowed)


def test_what_is_wrong_has_a_name_of_its_own():
    kinds = {s: check_state(s, "T", (DRAFT,)).kind for s in STATES if s != DRAFT}
    assert kinds == {
        IDLE: "spec-info-dropped",
        VERIFY: "verify-input-left",
        EXTEND: "wrong-type",
        "NgramVerifyInput": "wrong-type",
    }
    assert check_state(VERIFY, "T", (EXTEND,)).kind == "wrong-type"
    assert check_state(IDLE, "NoneType", (DRAFT,)).got == "None"
    assert check_state(VERIFY, "T", (DRAFT,)).got == "verify-input (T)"


def test_rows():
    assert check_rows({"a": 3, "b": 3}, {"a": 3, "b": 3}) is None
    assert check_rows({"a": 3, "other": 9}, {"a": 3}) is None
    violation = check_rows({"a": 3, "b": 2}, {"a": 3, "b": 3})
    assert (violation.kind, violation.what, violation.got) == ("wrong-shape", "b", "b has 2 rows")
    assert check_rows({"a": -1}, {"a": 1}).got == "a is None"
    assert check_rows({"a": 0}, {"a": 0}) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-2, 6), max_size=8), st.integers(1, 5))
def test_accept_lengths(correct, steps):
    bad = [i for i, n in enumerate(correct) if n < 0 or n > steps]
    violation = check_accepted(correct, len(correct), steps)
    assert (violation.row if violation else None) == (bad[0] if bad else None)
    assert check_accepted([*correct, 0], len(correct), steps) is not None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4)), min_size=1, max_size=8), st.data()
)
def test_counts_go_forward_by_what_was_accepted(rows, data):
    before, by = [b for b, _ in rows], [n for _, n in rows]
    after = [b + n for b, n in rows]
    assert check_advance("bookkeeping", "x", before, after, by) is None
    row = data.draw(st.integers(0, len(rows) - 1))
    off = data.draw(st.sampled_from([-3, -1, 1, by[row]]))
    after[row] += off
    violation = check_advance("bookkeeping", "x", before, after, by)
    assert (violation.kind, violation.row, violation.what) == ("bookkeeping", row, "x")
    assert violation.expected == f"x = {after[row] - off}"
    assert violation.got == f"x = {after[row]} ({off:+d})"


def test_a_number_for_each_request():
    assert check_counts("seq-len", "x", [1, 2], [1]).row == -1
    assert check_advance("seq-len", "x", [1, 2], [2, 3], [1]) is not None
    assert check_counts("seq-len", "x", [], []) is None
