"""The allocator's invariants, on arrays."""

from __future__ import annotations

import numpy as np
import pytest

from g4debug.tracers.kv_allocator.check import (
    check_freed,
    check_handed_out,
    check_partners,
    in_window,
)

pytestmark = pytest.mark.once("the code is ours alone")

PAGES = 10


def array(*pages):
    return np.array(pages, dtype=np.int64)


def flags(*pages):
    found = np.zeros(PAGES, dtype=np.bool_)
    found[list(pages)] = True
    return found


@pytest.mark.parametrize(
    ("pages", "kind", "guilty"),
    [
        ((1,), None, ()),
        ((9, 1, 2), None, ()),
        ((), None, ()),
        ((10,), "out-of-range", (10,)),
        ((-1, 1), "out-of-range", (-1,)),
        ((0,), "page-zero", (0,)),
        ((1, 0, 2), "page-zero", (0,)),
        ((5,), "double-alloc", (5,)),
        ((1, 5), "double-alloc", (5,)),
        ((1, 2, 1), "double-alloc", (1,)),  # twice in one go
        ((10, 0, 5), "out-of-range", (10,)),  # what crashes comes first
    ],
)
def test_handed_out(pages, kind, guilty):
    found = check_handed_out(array(*pages), flags(5, 6))
    assert (found.kind if found else None) == kind
    assert found is None or found.pages.tolist() == list(guilty)


@pytest.mark.parametrize(
    ("pages", "kinds"),
    [
        ((5, 6), {}),
        ((4,), {"double-free": [4]}),
        ((3,), {"free-unallocated": [3]}),
        ((5, 5), {"double-free": [5]}),
        ((0, 5), {"page-zero": [0]}),
        ((-2, 5, 10), {"out-of-range": [-2, 10]}),
        ((-1, 0, 3, 4, 5), {
            "out-of-range": [-1], "page-zero": [0], "free-unallocated": [3], "double-free": [4],
        }),
    ],
)  # fmt: skip
def test_freed(pages, kinds):
    found = check_freed(array(*pages), flags(5, 6), flags(4, 5, 6))
    assert {v.kind: v.pages.tolist() for v in found} == kinds


@pytest.mark.parametrize(
    ("freed", "expected", "foreign", "lost"),
    [
        ((2, 3), (2, 3), [], []),
        ((), (), [], []),
        ((2, 4), (2, 3), [4], [3]),
        ((), (2, 3), [], [2, 3]),
        ((7,), (), [7], []),
        ((7,), (-1, 2), [], []),  # not known: nothing is concluded
    ],
)
def test_partners(freed, expected, foreign, lost):
    found = check_partners(array(*freed), array(*expected))
    assert [x.tolist() for x in found] == [foreign, lost]


@pytest.mark.parametrize("window", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("query", range(60))
def test_the_window_token_by_token(query, window):
    size = 8
    positions = np.arange(0, 64, size)
    attended = set(range(max(0, query - window), query))  # its own token has no page to lose yet
    expected = [bool(attended & set(range(p, p + size))) for p in positions.tolist()]
    assert in_window(positions, size, query, window).tolist() == expected
    assert not in_window(np.array([-1]), size, query, window).any()
