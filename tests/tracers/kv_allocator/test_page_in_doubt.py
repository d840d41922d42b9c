"""A page in doubt: SGLang's structures agree among themselves, and only the ledger differs."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from real_backend import PAGE, Rig
from releases import kv_of

from g4debug import plugin
from g4debug.dumps import reading
from g4debug.findings.status import LEDGER
from g4debug.ledger.doubts import FORGETS
from g4debug.ledger.ledger import DOUBTS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
IN_DOUBT = "a page in doubt counts as what SGLang's own structures say of it"


@pytest.fixture
def armed(arm):
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="log")
    return Rig(), plugin.in_force.ledger, folder


def doubt(ledger, page, state):
    """The ledger is made to differ from SGLang, and takes its word back."""
    ledger.pools["full"].held[page] = not state
    ledger.doubt("full", torch.tensor([page]).numpy(), f"page {page}")


def tokens_of(rig, request):
    row = rig.req_to_token.req_to_token[kv_of(request).req_pool_idx]
    return row[: request.tokens].to(torch.int64)


def missed(rig):
    """Something happened to the free list that no hook saw."""
    allocator = rig.allocator.full_attn_allocator
    allocator.free_pages = allocator.free_pages.clone()


@pytest.mark.parametrize("events", ["none was missed", "some were missed"])
def test_it_is_named_and_nobody_is_accused(armed, caplog, events):
    rig, ledger, folder = armed
    a = rig.admit("a", 3 * PAGE)
    page = int(tokens_of(rig, a)[0]) // PAGE
    if events == "some were missed":
        missed(rig)
    doubt(ledger, page, True)
    (line,) = [m for m in caplog.messages if "in doubt" in m]
    assert f"full pages {page} are in doubt (page {page})" in line
    assert "The server is not accused" in line
    assert ("suspected" in line) == (events == "none was missed")
    assert ("An event was missed" in line) == (events != "none was missed")
    assert bool(ledger.pools["full"].held[page]), "SGLang's word is taken"
    (limit,) = ledger.status.record().limits
    assert limit.what == IN_DOUBT
    assert f"full pages {page}: " in limit.why
    assert not list(folder.glob("*.pt"))
    assert not ledger.broken


def test_a_second_corruption_is_told_and_its_dump_has_the_doubt(armed):
    rig, ledger, folder = armed
    a, b = rig.admit("a", 3 * PAGE), rig.admit("b", 3 * PAGE)
    page = int(tokens_of(rig, a)[0]) // PAGE
    doubt(ledger, page, True)
    rig.allocator.free(tokens_of(rig, b))
    rig.allocator.free(tokens_of(rig, b))
    record = reading.read(sorted(folder.glob("*.pt"))[0])
    assert record.finding.kind == "double-free"
    of_ledger = next(t for t in record.tracers if t.name == LEDGER)
    assert [x.what for x in of_ledger.limits] == [IN_DOUBT]
    assert f"full pages {page}: " in of_ledger.limits[0].why


@pytest.mark.parametrize(("apart", "given_up"), [(1, True), (FORGETS, False)])
def test_many_in_a_row_give_the_ledger_up_and_rare_ones_do_not(armed, apart, given_up):
    rig, ledger, _ = armed
    a = rig.admit("a", 3 * PAGE)
    page = int(tokens_of(rig, a)[0]) // PAGE
    missed(rig)
    for _ in range(DOUBTS):
        doubt(ledger, page, True)
        assert not ledger.broken
        plugin.in_force.recorder.step += apart
    doubt(ledger, page, True)
    assert bool(ledger.broken) is given_up
