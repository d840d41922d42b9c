"""Which pages the requests of a crash hold, as the dump keeps it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from g4debug.findings.record import Held
from g4debug.ledger import held
from g4debug.ledger.books import PoolLedger
from g4debug.settings import Settings
from g4debug.tracers.base import Context


@pytest.fixture
def ledger():
    ledger = Context.alone("pool-leak", Settings(debug_dir=Path("unused")), ledger=True).ledger
    for name in ("full", "swa"):
        ledger.pools[name] = PoolLedger(name, pages=100, page_size=64)
    return ledger


def enter(ledger, pool, pages, request, holds=True):
    ledger.enter(ledger.pools[pool], "extend", np.array(pages), holds=holds, request=request)


def test_pages_that_were_handed_out_and_not_freed_are_runs(ledger):
    enter(ledger, "full", [5, 6, 7, 90, 30], "a")
    enter(ledger, "swa", [1], "a")
    enter(ledger, "full", [8, 9], "b")
    enter(ledger, "full", [40], "other")
    enter(ledger, "full", [6], "", holds=False)
    found = held.of_requests(ledger, ["a", "b", ""])
    assert found == (
        Held("full", "a", (5, 5, 7, 7, 30, 30, 90, 90), 4),
        Held("full", "b", (8, 9), 2),
        Held("swa", "a", (1, 1), 1),
        Held("swa", "b", (), 0),
    )
    assert [page for page in range(100) if found[0].has(page)] == [5, 7, 30, 90]
    assert not any(h.is_cut for h in found)


def test_what_has_no_room_is_counted(ledger, monkeypatch):
    monkeypatch.setattr(held, "MOST_RUNS", 2)
    enter(ledger, "full", [1, 3, 5], "a")
    enter(ledger, "swa", [2], "a")
    full, swa = held.of_requests(ledger, ["a"])
    assert (full.runs, full.count, full.is_cut) == ((1, 1, 3, 3), 3, True)
    assert (swa.runs, swa.count, swa.is_cut) == ((), 1, True)


def test_nothing_is_concluded_without_a_sound_ledger(ledger):
    enter(ledger, "full", [5], "a")
    assert held.of_requests(None, ["a"]) == ()
    ledger.broken = "it missed events"
    assert held.of_requests(ledger, ["a"]) == ()
