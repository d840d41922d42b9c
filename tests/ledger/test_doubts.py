"""What goes wrong now and then is forgotten, and what goes wrong one after the other adds up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.ledger.doubts import FORGETS, Doubts

pytestmark = pytest.mark.once("the code is ours alone")


def test_one_after_the_other_adds_up():
    doubts = Doubts(SimpleNamespace(step=0))
    assert [doubts.add() for _ in range(4)] == [1, 2, 3, 4]


def test_one_is_forgotten_in_each_span_of_steps():
    clock = SimpleNamespace(step=50)
    doubts = Doubts(clock)
    for _ in range(5):
        doubts.add()
    clock.step += FORGETS - 1
    assert doubts.add() == 6
    clock.step += 1  # the first span is over
    assert doubts.add() == 6
    clock.step += 2 * FORGETS
    assert doubts.add() == 5
    clock.step += 10 * FORGETS  # more than there are
    assert doubts.add() == 1


def test_a_span_that_has_begun_is_not_begun_anew_by_another_one():
    clock = SimpleNamespace(step=0)
    doubts = Doubts(clock)
    doubts.add()
    for _ in range(3):
        clock.step += FORGETS // 2
        found = doubts.add()
    assert found == 3  # four, of which one was forgotten


def test_months_of_a_rare_one_never_add_up():
    clock = SimpleNamespace(step=0)
    doubts = Doubts(clock)
    most = 0
    for _ in range(1000):
        clock.step += FORGETS
        most = max(most, doubts.add())
    assert most == 1
