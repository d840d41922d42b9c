"""With pages of one token a decode hands one page to each request, and all are entered together.

``Ledger.enter_each`` must leave what an ``enter`` of each page alone leaves: the same books, the
same log, the same counts, and the same for whoever listens. So both are done, and compared.
"""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from g4debug.findings.record import Finding, Location
from g4debug.findings.steps import Recorder
from g4debug.ledger.books import PoolLedger
from g4debug.ledger.ledger import Ledger
from g4debug.ledger.token_rows import TokenRows
from g4debug.settings import Settings
from g4debug.tracers.base import Context
from g4debug.tracers.kv_allocator.tracer import KvAllocatorTracer
from g4debug.tracers.prefix_cache.contents import Contents
from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer
from g4debug.trapping.trap import TrapError

PAGES = 40
FIELDS = ("held", "ever", "owner", "position", "partner", "recent", "_turn")
ENTERED = "the ledger's caller"


def ledger_of(pages: int = PAGES) -> tuple[Ledger, PoolLedger]:
    ledger = Ledger(Recorder(1))
    ledger.pools["full"] = pool = PoolLedger("full", pages, 1)
    return ledger, pool


def left(ledger: Ledger, pool: PoolLedger) -> dict[str, object]:
    found = {name: getattr(pool, name).tolist() for name in FIELDS}
    events = [astuple(event) for event in ledger.last_events()]
    return found | {"tails": pool.tails, "events": events, "serial": ledger.serial}


@st.composite
def hand_outs(draw):
    """(pages, requests, positions), mostly of new pages; and what is freed before the next."""
    size = draw(st.integers(1, 20))
    pages = draw(st.permutations(range(1, PAGES)))[:size]
    if draw(st.sampled_from([False, False, False, True])):
        wrong = st.sampled_from([0, -1, PAGES, 1 << 40, pages[0]])
        pages[draw(st.integers(0, size - 1))] = draw(wrong)
    requests = draw(st.lists(st.sampled_from(["", *"abcdef"]), min_size=size, max_size=size))
    freed = draw(st.lists(st.integers(1, PAGES - 1), unique=True, max_size=PAGES))
    return pages, requests, list(range(100, 100 + size)), freed


@given(st.lists(hand_outs(), max_size=6))
@example([([3], ["a"], [7], [])])
@example([([3, 4, 3], ["a", "b", "c"], [7, 8, 9], []), ([5, 6], ["a", "a"], [1, 2], [])])
def test_it_leaves_what_one_after_the_other_leaves(steps):
    together, alone = ledger_of(), ledger_of()
    heard = {id(together[0]): [], id(alone[0]): []}
    for ledger, _ in (together, alone):
        told = heard[id(ledger)]
        ledger.listen(lambda pool, event, pages, told=told: told.append((event.kind, *pages)))
        ledger.listen(lambda pool, event, pages, told=told: told.append(event.request), "alloc")
        ledger.listen(lambda pool, event, pages, told=told: told.append("no"), "extend")
    for pages, requests, positions, freed in steps:
        given_now, at = np.array(pages), np.array(positions)
        ledger, pool = together
        new = pool.are_new(given_now)
        assert new is (
            len(set(pages)) == len(pages)
            and all(0 < page < PAGES and not pool.held[page] for page in pages)
        )
        assert ledger.enter_each(pool, "alloc", given_now, requests, at, ENTERED) is new
        for ledger, pool in (alone,) if new else (together, alone):
            for i, request in enumerate(requests):
                ledger.enter(
                    pool, "alloc", given_now[i : i + 1], holds=True,
                    request=request, positions=positions[i : i + 1], caller=ENTERED,
                )  # fmt: skip
        for ledger, pool in (together, alone):
            ledger.enter(pool, "free", np.array(freed, dtype=np.int64), holds=False)
        assert left(*together) == left(*alone)
    # Each listener hears all events, one listener after the other in place of one event.
    assert sorted(map(str, heard[id(together[0])])) == sorted(map(str, heard[id(alone[0])]))


def test_the_counts_of_kv_allocator_are_the_same():
    counts = []
    for at_once in (True, False):
        context = Context.alone("kv-allocator", Settings(), ledger=True)
        tracer, ledger = KvAllocatorTracer(context), context.ledger
        ledger.listen(tracer.listen, fresh=tracer.listen_to_fresh if at_once else None)
        pool = ledger.pools["full"] = PoolLedger("full", PAGES, 1)
        context.recorder.step = 3
        pages = np.array([3, 9, 4])
        assert ledger.enter_each(pool, "alloc", pages, [*"abc"], np.array([5, 6, 7]), ENTERED)
        counts.append([(t.what, t.count, t.step) for t in context.status.record().checked])
    assert counts[0] == counts[1]
    assert sum(count for _, count, _ in counts[0]) == 3


def test_prefix_cache_forgets_what_the_pages_held():
    context = Context.alone("prefix-cache", Settings(), ledger=True)
    tracer, ledger = PrefixCacheTracer(context), context.ledger
    tracer._unjudged = ""
    pool = ledger.pools["full"] = PoolLedger("full", PAGES, 1)
    tracer.contents = Contents(PAGES)
    tracer.contents.digest[:] = 7
    ledger.listen(tracer.listen, "alloc", fresh=tracer.listen_to_fresh)
    assert ledger.enter_each(pool, "alloc", np.array([3, 9]), [*"ab"], np.array([5, 6]), ENTERED)
    assert tracer.contents.digest.nonzero()[0].tolist() == [
        page for page in range(PAGES) if page not in (3, 9)
    ]


def test_a_finding_leaves_the_ledger_whole():
    """All pages were handed out, whatever somebody finds in one of them."""
    ledger, pool = ledger_of()

    def listener(pool, event, pages):
        if event.pages == (9,):
            raise TrapError(Finding("c", "k", "s", "h", Location(), "e", "g"), None, "")

    ledger.listen(listener)
    with pytest.raises(TrapError):
        ledger.enter_each(pool, "alloc", np.array([3, 9, 4]), [*"abc"], np.arange(3), ENTERED)
    assert pool.held.nonzero()[0].tolist() == [3, 4, 9]
    assert [event.request for event in ledger.last_events()] == [*"abc"]


def test_the_black_box_gets_each_event():
    ledger, pool = ledger_of()
    written = []
    ledger.log.also = written.append
    ledger.enter_each(pool, "alloc", np.array([3, 9]), [*"ab"], np.array([5, 6]), ENTERED)
    assert [(e.pages, e.request, e.count) for e in written] == [((3,), "a", 1), ((9,), "b", 1)]


class Request(SimpleNamespace):
    pass


def decode(lengths, **fields):
    reqs = [Request(rid=rid, req_pool_idx=row) for row, rid in enumerate("abc", 1)]
    known = {"reqs": reqs, "spec_info": None, "seq_lens_cpu": torch.tensor(lengths)}
    return SimpleNamespace(**{**known, **fields})


def test_who_gets_which_token_is_what_the_shares_say():
    rows = TokenRows(decode([7, 1, 4]), "decode")
    told = [(s.rid, s.first, s.end, [*s.positions], s.row) for s in rows.each(3).shares()]
    assert told == [(s.rid, s.first, s.end, [*s.positions], s.row) for s in rows.shares(3)]


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        (TokenRows(decode([7, 1, 4]), "verify"), 3),
        (TokenRows(decode([7, 1, 4], prefix_lens=[0] * 3, extend_lens=[1] * 3), "extend"), 3),
        (TokenRows(decode([7, 1, 4]), "decode"), 6),
        (TokenRows(decode([7, 1]), "decode"), 3),
        (TokenRows(decode([7, 1, 4], seq_lens_cpu=None), "decode"), 3),
        (TokenRows(decode([], reqs=[]), "decode"), 0),
        (TokenRows(decode([7, 1, 4], spec_algorithm=SimpleNamespace(is_none=lambda: False)),
                   "decode"), 3),
    ],
)  # fmt: skip
def test_any_other_allocation_is_none_of_one_token_each(rows, tokens):
    assert rows.each(tokens) is None
