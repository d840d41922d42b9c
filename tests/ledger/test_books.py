"""Indices on the host: the sorted, distinct ones and pairs, which are numpy's own by definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from g4debug.ledger.books import distinct
from g4debug.ledger.free_hooks import _distinct_pairs

INDICES = st.lists(st.integers(-3, 12), max_size=40)


@given(INDICES)
def test_distinct_is_what_numpy_says(values):
    array = np.array(values, dtype=np.int64)
    before = array.copy()
    assert distinct(array).tolist() == np.unique(array).tolist()
    assert (array == before).all()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40))
def test_so_are_the_distinct_pairs(pairs):
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    first, second = _distinct_pairs(array[:, 0], array[:, 1])
    wanted = np.unique(array, axis=0)
    assert np.stack((first, second), axis=1).tolist() == wanted.tolist()
