"""The invariants of a speculative step, against what they say in words."""

from __future__ import annotations

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from g4debug.tracers.spec_lifecycle.check import (
    DRAFT,
    EXTEND,
    IDLE,
    VERIFY,
    Violation,
    at_rows,
    check_accepted,
    check_advance,
    check_allocated,
    check_bonus,
    check_counts,
    check_owners,
    check_publish,
    check_rows,
    check_same_rows,
    check_state,
    check_written,
)

pytestmark = pytest.mark.once("the code is ours alone")

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


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(-2, 6), max_size=8), st.integers(1, 5))
def test_accept_lengths(correct, steps):
    bad = [i for i, n in enumerate(correct) if n < 0 or n > steps]
    violation = check_accepted(correct, len(correct), steps)
    assert (violation.row if violation else None) == (bad[0] if bad else None)
    assert check_accepted([*correct, 0], len(correct), steps) is not None


@settings(max_examples=examples(200), deadline=None)
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


# --- speculative decoding v2 ---

ROWS = st.lists(st.integers(0, 9), min_size=2, max_size=6, unique=True)


@settings(max_examples=examples(200), deadline=None)
@given(ROWS, st.data())
def test_two_rows_that_are_exchanged_are_found(rows, data):
    assert check_same_rows(rows, rows) is None
    a, b = sorted(data.draw(st.permutations(range(len(rows))))[:2])
    indices = list(rows)
    indices[a], indices[b] = rows[b], rows[a]
    violation = check_same_rows(rows, indices)
    assert (violation.kind, violation.row) == ("future-row", a)
    assert violation.got == f"future_indices = {rows[b]}"
    assert check_same_rows(rows, rows[:-1]).row == -1


def test_a_row_has_one_owner():
    assert check_owners([3, 1], ["a", "b"], [None, None]) is None
    assert check_owners([3, 1], ["a", "b"], ["a", None]) is None
    assert check_owners([3, 3], ["a", "b"], [None, None]).row == 1
    taken = check_owners([3, 1], ["a", "b"], [None, "c"])
    assert (taken.row, taken.expected) == (1, "row 1 written for c only")


@pytest.mark.parametrize(
    ("written", "got"),
    [
        (("a", 5), None),
        (None, "never written"),
        (("b", 5), "written for request b in step 5"),
    ],
)
def test_what_is_read_was_written_by_the_request_in_its_last_step(written, got):
    violation = check_written("lengths", 7, "a", written)
    assert (violation and violation.got) == got


def test_the_order_of_publishing():
    sound = {"decode": True, "verified": True, "times": 0, "own_lengths": True, "own_rows": True}
    assert check_publish(**sound) is None
    assert check_publish(**{**sound, "decode": False, "verified": False}) is None
    kinds = {
        name: check_publish(**{**sound, name: value}).what
        for name, value in (
            ("verified", False),
            ("times", 1),
            ("own_lengths", False),
            ("own_rows", False),
        )
    }
    assert list(kinds.values()) == ["early", "twice", "lengths", "published"]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True), st.data())
def test_the_bonus_token_is_the_last_one(last, data):
    rids = [f"r{i}" for i in range(len(last))]
    earlier = lambda i: [90 + i, 80]  # noqa: E731
    assert check_bonus(rids, last, last, earlier) is None
    row = data.draw(st.integers(0, len(last) - 1))
    for wrong, says in ((70, "another"), (90 + row, "an earlier"), (80, "an earlier")):
        got = [*last[:row], wrong, *last[row + 1 :]]
        violation = check_bonus(rids, last, got, earlier)
        assert (violation.kind, violation.row) == ("bonus-token", row)
        assert violation.got.startswith(says)
        assert str(wrong) not in violation.got  # no token is told
    if len(last) > 1:
        other = (row + 1) % len(last)
        got = [*last[:row], last[other], *last[row + 1 :]]
        assert check_bonus(rids, last, got, earlier).got == f"the last token of request r{other}"


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.data())
def test_there_is_room_for_what_is_written(needs, data):
    room = [n + data.draw(st.integers(0, 9)) for n in needs]
    assert check_allocated(needs, room, "why") is None
    row = data.draw(st.integers(0, len(needs) - 1))
    short = data.draw(st.integers(1, 9))
    room[row] = needs[row] - short
    violation = check_allocated(needs, room, "why")
    assert (violation.kind, violation.row, violation.off) == ("allocated-len", row, -short)


def test_the_row_in_the_batch():
    assert at_rows(None, [4]) is None
    assert at_rows(Violation("seq-len", "", "", 1), [4, 7]).row == 7
    assert at_rows(Violation("seq-len", "", ""), [4, 7]).row == -1
