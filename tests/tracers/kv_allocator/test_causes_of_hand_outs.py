"""Whether a page that should not have been handed out was in the free list, and what that tells."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from g4debug.findings.record import PageEvent
from g4debug.ledger.books import PoolLedger
from g4debug.tracers.kv_allocator.causes import cause
from g4debug.tracers.kv_allocator.check import Violation

pytestmark = pytest.mark.once("the code is ours alone")
FAR, HELD = 99, 5


def told(kind, page, listed, by="extend"):
    """The cause, if the list had the page before the call, or not, or if that is not known (None).

    Nothing is recorded of the page.
    """
    before = torch.tensor([1, page, 2]) if listed else torch.tensor([1, 2])
    ledger = SimpleNamespace(
        lists={} if listed is None else {"full": SimpleNamespace(before=(before,))},
        late=False,
        history=lambda pool, page: (),
        log=SimpleNamespace(last_naming=lambda *of: None),
    )
    pool = PoolLedger("full", 10, 16)
    pool.held[HELD] = True
    event = PageEvent(3, by, "full", (page,), 1)
    return cause(ledger, pool, event, Violation(kind, np.array([page])))


@pytest.mark.parametrize(
    ("kind", "page", "listed", "words"),
    [
        ("double-alloc", HELD, True, "the page was in the free list, although it is held"),
        ("double-alloc", HELD, False, "the allocator returned page 5, which was not in its free"),
        ("double-alloc", HELD, None, "either the allocator handed it out without taking it from"),
        ("out-of-range", FAR, True, "list had page 99, and no free of it was recorded: the list"),
        ("out-of-range", FAR, False, "the allocator returned page 99, which was not in its free"),
        ("out-of-range", FAR, None, "not known: either the allocator's free list had page 99"),
        ("page-zero", 0, True, "list had the reserved page 0, and no free of it was recorded"),
        ("page-zero", 0, False, "the allocator returned the reserved page 0, which was not in"),
        ("page-zero", 0, None, "not known: either the allocator's free list had the reserved page"),
    ],
)
def test_the_words_claim_no_more_than_the_list_tells(kind, page, listed, words):
    assert words in told(kind, page, listed)


@pytest.mark.parametrize(
    ("by", "method"),
    [("extend", "alloc_extend"), ("decode", "alloc_decode"), ("alloc", "alloc")],
)
def test_the_call_that_returned_it_is_named(by, method):
    assert f"list: {method}, or what wraps it" in told("double-alloc", HELD, False, by)
