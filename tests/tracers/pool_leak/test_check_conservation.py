"""take_census against a count by hand, and against a plain model on random pools."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from g4debug.tracers.pool_leak.check import take_census


def census(pages, free, owned):
    found = take_census(pages, np.array(free, dtype=np.int64), np.array(owned, dtype=np.int64))
    parts = (found.leaked, found.double, found.repeated, found.outside)
    assert found.sound is not any(len(p) for p in parts)
    return tuple(p.tolist() for p in parts)


def test_a_sound_pool():
    assert census(6, [5, 1], [2, 3, 4, 2]) == ([], [], [], [])
    assert census(1, [], []) == ([], [], [], [])


def test_each_way_of_not_adding_up():
    assert census(6, [5], [2, 3]) == ([1, 4], [], [], [])
    assert census(6, [5, 1, 2], [2, 3, 4]) == ([], [2], [], [])
    assert census(6, [5, 1, 1], [2, 3, 4]) == ([], [], [1], [])
    assert census(6, [5, 1, 0, 6, -2], [2, 3, 4]) == ([], [], [], [-2, 0, 6])
    assert census(3, [1, 2], [0, 7, -1]) == ([], [], [], [])  # not this check's business


@given(st.integers(1, 12), st.lists(st.integers(-2, 14)), st.lists(st.integers(-2, 14)))
def test_it_is_what_sets_say(pages, free, owned):
    valid = set(range(1, pages))
    assert census(pages, free, owned) == (
        sorted(valid - set(free) - set(owned)),
        sorted(valid & set(free) & set(owned)),
        sorted(p for p in valid if free.count(p) > 1),
        sorted(set(free) - valid),
    )
