"""Fields of several requests, which SGLang keeps in the request or in its ``kv``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from g4debug.hooking import req_kv

NAMES = (req_kv.ROW, req_kv.COMMITTED, req_kv.ALLOCATED, req_kv.EVICTED)


def old(row, *lengths):
    """As until 0.5.17: all of it is in the request."""
    return SimpleNamespace(**dict(zip(NAMES, (row, *lengths), strict=False)))


def new(row, *lengths):
    """As later: in ``kv``."""
    return SimpleNamespace(kv=old(row, *lengths))


def between(row, *lengths):
    """As in between: the row is in the request, the lengths are in ``kv``."""
    held = old(row, *lengths)
    del held.req_pool_idx
    return SimpleNamespace(req_pool_idx=row, kv=held)


RELEASED = SimpleNamespace(kv=None)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([], [[], [], [], []]),
        ([old(3, 10, 16, 0), old(None, 0, 0, 0)], [[3, None], [10, 0], [16, 0], [0, 0]]),
        ([new(3, 10, 16, 0), new(4, 20, 32, 16)], [[3, 4], [10, 20], [16, 32], [0, 16]]),
        ([between(3, 10, 16, 0), between(4, 20, 32, 16)], [[3, 4], [10, 20], [16, 32], [0, 16]]),
        ([new(3, 10, 16), new(4, 20, 32)], [[3, 4], [10, 20], [16, 32], [None, None]]),
        ([new(3, 10, 16, 0), RELEASED], [[3, None], [10, None], [16, None], [0, None]]),
        ([RELEASED, new(3, 10, 16, 0)], [[None, 3], [None, 10], [None, 16], [None, 0]]),
        ([old(3, 10, 16, 0), new(4, 20, 32, 16)], [[3, 4], [10, 20], [16, 32], [0, 16]]),
    ],
)
def test_one_pass_finds_what_a_pass_for_each_field_finds(requests, expected):
    assert req_kv.columns(requests) == expected
    assert [req_kv.values(requests, name) for name in NAMES] == expected
    if all(value is not None for column in expected for value in column) and uniform(requests):
        assert list(req_kv.of_step(requests)) == [
            n for row in zip(*expected, strict=True) for n in row
        ]


def uniform(requests):
    """They have their fields in the same places."""
    return len({hasattr(request, "kv") for request in requests}) < 2


def test_from_0_5_21_on_the_evictions_are_by_component():
    a, b = new(3, 10, 16), RELEASED
    a.kv.component_evicted_seqlens, a.kv.max_evicted_seqlen = {"swa": 4}, 4
    assert req_kv.columns([a]) == [[3], [10], [16], [4]]
    assert list(req_kv.of_step([a, a])) == [3, 10, 16, 4] * 2
    a.kv.component_evicted_seqlens = {"swa": 4, "other": 7}  # the property gives the most
    assert list(req_kv.of_step([a])) == [3, 10, 16, 7]
    a.kv.component_evicted_seqlens = {}
    assert list(req_kv.of_step([a])) == [3, 10, 16, 0]
    with pytest.raises(AttributeError):
        list(req_kv.of_step([a, b]))
    assert req_kv.columns([a, b]) == [[3, None], [10, None], [16, None], [4, None]]


def test_of_several_components_the_one_that_has_given_back_least():
    a, old = new(3, 10, 16), SimpleNamespace(swa_evicted_seqlen=-4)
    a.kv.component_evicted_seqlens = {"swa": 4, "other": -7}
    assert req_kv.least_evicted(a) == -7
    a.kv.component_evicted_seqlens = {}
    assert req_kv.least_evicted(a) == 0
    assert req_kv.least_evicted(old) == -4
    assert req_kv.least_evicted(SimpleNamespace()) == 0
