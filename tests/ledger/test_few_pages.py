"""An event of a few pages is entered and judged page by page, a larger one by arrays.

``FEW`` and ``FEW_ENTERED`` of the books are where the one ends and the other begins. Which of the
two it is must make no difference: neither to the books nor to what is found. So each event is
entered and judged three times: as it is on a server, all by arrays, and all page by page.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from g4debug.ledger import books, free_hooks
from g4debug.ledger.books import FEW, FEW_ENTERED, PoolLedger, distinct
from g4debug.ledger.free_hooks import _distinct_pairs
from g4debug.tracers.kv_allocator import check
from g4debug.tracers.prefix_cache import check as handing_over
from g4debug.tracers.prefix_cache import contents

PAGES = 30
FIELDS = ("held", "ever", "owner", "position", "partner", "recent", "_turn")
WAYS = {"as served": FEW, "arrays": -1, "page by page": 1000}
AT_THE_LIMIT = tuple(limit + more for limit in (FEW_ENTERED, FEW) for more in (-1, 0, 1))
FIRST = list(range(1, FEW + 2))


@contextmanager
def few(most):
    """Events of up to so many pages are entered and judged page by page."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (books, free_hooks, check, contents):
            patch.setattr(module, "FEW", most)
        patch.setattr(books, "FEW_ENTERED", FEW_ENTERED if most == FEW else most)
        yield


def array(indices):
    return np.array(indices, dtype=np.int64)


@st.composite
def indices(draw):
    """Mostly sound ones; also page 0, negative ones, ones beyond the pool, and the same twice."""
    size = draw(st.integers(0, 3) | st.sampled_from(AT_THE_LIMIT) | st.integers(0, 24))
    sound = draw(st.permutations(range(1, PAGES)))[:size]
    if draw(st.booleans()):
        sound.sort()
    wrong = st.sampled_from([0, -1, -PAGES, PAGES, PAGES + 1, 1 << 40, 1, 2])
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])) if sound else 0):
        sound[draw(st.integers(0, size - 1))] = draw(wrong)
    return sound


@st.composite
def events(draw):
    """(pages, whether they are held after it, the request, their positions or None)."""
    pages, holds = draw(indices()), draw(st.sampled_from([True, True, False, None]))
    positions = draw(st.none() | st.just([16 * n for n in range(len(pages))]))
    return pages, holds, draw(st.sampled_from(["", "a", "b"])), positions


def judged(pool, pages, holds):
    """What kv-allocator finds in an event, and what the ledger itself asks about its pages."""
    if holds:
        found = check.check_handed_out(pages, pool.held)
        violations = [] if found is None else [found]
    else:
        violations = check.check_freed(pages, pool.held, pool.ever)
    said = [(v.kind, v.pages.tolist()) for v in violations]
    return said, pool.inside(pages).tolist(), pool.owners(pages), distinct(pages).tolist()


def state(pool):
    return {name: getattr(pool, name).tolist() for name in FIELDS} | {"tails": dict(pool.tails)}


def of_size(size):
    """Events of this many pages: handed out, freed, freed again, and with each kind of bad page."""
    pages = list(range(1, size + 1))
    bad = [[wrong, *pages[1:]] for wrong in (0, -1, PAGES, pages[1])]
    return [
        (pages, True, "a", [16 * n for n in range(size)]),
        (pages, None, "", None),
        (pages[::-1], False, "", None),
        (pages, False, "", None),
        *(
            (wrong, holds, "b", [16 * n for n in range(size)] if holds else None)
            for wrong in bad
            for holds in (True, False)
        ),
        ([*pages[:-1], pages[0]], True, "b", [16 * n for n in range(size)]),
    ]


@given(st.lists(events(), max_size=10))
@example(of_size(FEW_ENTERED))
@example(of_size(FEW_ENTERED + 1))
@example(of_size(FEW - 1))
@example(of_size(FEW))
@example(of_size(FEW + 1))
@example([([1], True, "a", None), ([PAGES], True, "a", None)])
@example([([], holds, "a", positions) for holds in (True, False, None) for positions in (None, [])])
def test_both_ways_give_the_same_books_and_find_the_same(entered):
    pools = {way: PoolLedger("full", PAGES, 16) for way in WAYS}
    for serial, (pages, holds, request, positions) in enumerate(entered):
        found = {}
        for way, most in WAYS.items():
            given_now = array(pages)
            with few(most):
                found[way] = judged(pools[way], given_now, holds)
                pools[way].enter(given_now, serial, holds, request, positions)
            assert given_now.tolist() == pages, "an event's own pages are left as they are"
        for way in WAYS:
            assert found[way] == found["arrays"], way
            assert state(pools[way]) == state(pools["arrays"]), way


@pytest.mark.parametrize("size", AT_THE_LIMIT)
@pytest.mark.parametrize("more", [-1, 1])
def test_positions_that_are_not_one_for_each_page_are_refused(size, more):
    for most in WAYS.values():
        with few(most), pytest.raises(ValueError, match=r"shape mismatch|zip"):
            PoolLedger("full", PAGES, 16).enter(
                array(FIRST[:size]), 0, True, "a", list(range(size + more))
            )


@given(indices(), indices(), st.booleans())
@example(FIRST[:FEW], FIRST, False)
@example(FIRST, FIRST, True)
@example(FIRST[: FEW - 1], [-1, *FIRST], False)
def test_so_it_is_with_partners(freed, expected, same):
    freed, expected = np.sort(array(freed)), np.sort(array(freed if same else expected))
    said = []
    for most in WAYS.values():
        with few(most):
            said.append([pages.tolist() for pages in check.check_partners(freed, expected)])
    assert said == [said[0]] * len(WAYS)


@given(indices(), indices())
@example(FIRST[:FEW], FIRST[:FEW])
@example(FIRST, FIRST)
def test_and_with_pairs(first, second):
    both = min(len(first), len(second))
    said = []
    for most in WAYS.values():
        with few(most):
            pairs = _distinct_pairs(array(first[:both]), array(second[:both]))
            said.append([pages.tolist() for pages in pairs])
    assert said == [said[0]] * len(WAYS)


@given(indices())
@example(FIRST[:FEW])
@example(FIRST)
def test_and_with_what_the_prefix_cache_knows_of_pages(pages):
    said = []
    for most in WAYS.values():
        known = contents.Contents(PAGES)
        known.digest[:] = 7
        with few(most):
            known.forget(array(pages))
            twice = handing_over.handed_over(
                array(pages).clip(0, PAGES - 1), np.full(len(pages), 7, dtype=np.uint64),
                contents.Contents(PAGES), None, "a", 0, 16, True,
            )  # fmt: skip
        said.append((known.digest.tolist(), twice))
    assert said == [said[0]] * len(WAYS)
