"""Each page of a running request is somebody's: any wrong one, in any part of its row, is told.

The rows are SGLang's own, changed behind everybody's back; nothing else is. It must be told in that
forward, of the right request, with the row as the cause, and it must cost the ledger nothing.
"""

from __future__ import annotations

import pytest
from real_backend import PAGE
from served_rows import ARMED, Serving

from g4debug.trapping.trap import TrapError

LAST = 6  # b has 100 tokens: six whole pages, and one with four
ROW_WRONG = ("req_to_token is wrong", "of req_to_token is wrong")
KINDS = {"foreign-page", "misplaced-page", "use-after-free"}


def anothers(it, column):
    it.write("b", column, it.rig.page("a", 1))


def anothers_of_the_same_column(it, column):
    it.write("b", column, it.rig.page("c", min(column, 3)))


def free(it, column):
    page = int((~it.ledger.pools["full"].held[1:]).nonzero()[0][-1]) + 1
    it.write("b", column, page)


def its_own_twice(it, column):
    it.write("b", column, it.rig.page("b", (column + 2) % (LAST + 1)))


def two_in_the_wrong_order(it, column):
    other = column - 1 if column else 1
    one, two = it.rig.page("b", column), it.rig.page("b", other)
    it.write("b", column, two)
    it.write("b", other, one)


WRONG = [anothers, anothers_of_the_same_column, free, its_own_twice, two_in_the_wrong_order]
MIDDLE = pytest.param(3, marks=pytest.mark.long("the first and the last column are enough"))
# How many tokens of each request the prefix cache holds, and how many of them it lent.
CACHES = {"radix off": None, "lent nothing": (96, 0), "lent one page": (96, PAGE)}


@pytest.fixture
def serving(arm):
    def make(cache):
        folder = arm(**ARMED)
        it = Serving()
        it.forward()
        if CACHES[cache] is not None:
            it.cache(*CACHES[cache])
        it.forward()
        return it, folder

    return make


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("column", [0, MIDDLE, LAST])
@pytest.mark.parametrize("wrong", WRONG)
def test_it_is_told(serving, mode, cache, column, wrong, caplog):
    if cache == "lent one page" and column == 0 and wrong is anothers_of_the_same_column:
        pytest.skip("prefix-cache tells it: lent-row, in tests/tracers/prefix_cache")
    it, _ = serving(cache)
    wrong(it, column)
    with pytest.raises(TrapError) as error:
        it.forward(mode)
    finding = error.value.finding
    assert finding.kind in KINDS
    assert finding.location.request == "b"
    near = (column, column - 1 if column else 1)
    assert finding.location.column in (near if wrong is two_in_the_wrong_order else (column,))
    assert any(row in finding.cause for row in ROW_WRONG), finding.cause
    assert not it.ledger.broken
    assert not any("in doubt" in line for line in caplog.messages)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_sound_row_is_not(serving, mode, cache, caplog):
    it, folder = serving(cache)
    it.forward(mode)
    assert not list(folder.glob("*.pt"))
    assert not any("confirm" in line or "doubt" in line for line in caplog.messages)


@pytest.mark.parametrize("lent", [0, PAGE])
def test_what_the_cache_had_already_is_lent(serving, lent):
    """On insert, SGLang frees the request's own pages and lets its row name the cache's."""
    it, folder = serving("radix off")
    table, b = it.rig.req_to_token.req_to_token, it.requests["b"]
    a_pages = [it.rig.page("a", column) for column in range(3)]
    own = [it.rig.page("b", column) for column in range(3)]
    b.put(cache_protected_len=lent)
    it.protect()
    for column in range(lent // PAGE, 3):
        it.write("b", column, a_pages[column])
    b.put(cache_protected_len=48)
    it.protect()
    assert table is it.rig.req_to_token.req_to_token
    assert own != a_pages
    it.forward()
    assert not list(folder.glob("*.pt"))
