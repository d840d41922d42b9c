"""The allocator's faults on SGLang's real allocators: what they break, and who says so."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from real_backend import FULL, PAGE, WINDOW, Rig

from g4debug import plugin
from g4debug.hooking import targets
from g4debug.trapping.trap import TrapError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine refuses CUDA machines"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
]
ARMED = {"G4DEBUG_TRACE": "kv-allocator"}


def use(rig):
    """Two requests come, grow by a page, and the first one goes."""
    requests = [rig.admit("a", 3 * PAGE), rig.admit("b", 2 * PAGE)]
    for request in requests:
        row = rig.req_to_token.req_to_token[request.req_pool_idx]
        length = torch.tensor([request.tokens + 1])
        last = row[request.tokens - 1 : request.tokens].to(torch.int64)
        for _ in range(3):
            last = rig.allocator.alloc_decode(length, length, last)
            row[request.tokens] = int(last)
            request.tokens += 1
            length = length + 1
    first = requests[0]
    row = rig.req_to_token.req_to_token[first.req_pool_idx]
    rig.allocator.free(row[: first.tokens].to(torch.int64))
    return requests


def free_lists(rig):
    """The free pages of each pool; ``release_pages`` is None where nothing waits in it (0.5.23)."""
    found = {}
    for name in ("full", "swa"):
        inner = getattr(rig.allocator, f"{name}_attn_allocator")
        parts = (inner.free_pages, inner.release_pages)
        found[name] = torch.cat([p for p in parts if p is not None]).tolist()
    return found


CASES = {
    "double-free=1*on": "double-free",
    "free-unallocated=1*on": "free-unallocated",
    "alloc-out-of-range=1*on": "out-of-range",
    "alloc-out-of-range=1*swa": "out-of-range",
    "alloc-page-zero=1*on": "page-zero",
    "alloc-double=1*on": "double-alloc",
    "swa-mapping-corrupt=1*on@at=6": "mapping-mismatch",  # 3 to fill the pool, 2 to come
}


@pytest.mark.parametrize("plan", CASES)
def test_the_tracer_that_it_names_catches_it(arm, plan, caplog):
    arm(G4DEBUG_FAULTS=f"seed=3;{plan}", **ARMED)
    with pytest.raises(TrapError) as error:
        use(Rig())
    assert error.value.finding.kind == CASES[plan]
    name = plan.partition("=")[0]
    assert sum(f"{name} #1" in m for m in caplog.messages) == 1


def broken(rig):
    """The errors in the allocator's own state, in words."""
    lists = free_lists(rig)
    found = []
    for name, pages in lists.items():
        if len(pages) != len(set(pages)):
            found.append(f"{name}: a page is in the free list twice")
        if any(p <= 0 or p > FULL // PAGE for p in pages):
            found.append(f"{name}: no such page in the free list")
    return found


@pytest.mark.parametrize(
    ("plan", "error", "state"),
    [
        # The page is in the free list twice: the next two requests would share it.
        ("double-free=1*on", None, ["full: a page is in the free list twice"]),
        ("free-unallocated=1*on", None, ["full: a page is in the free list twice"]),
        ("alloc-out-of-range=1*on", IndexError, []),  # on CUDA, an illegal memory access
        # In the mapping, too: the next kernel crashes.
        ("alloc-out-of-range=1*swa", None, ["swa: no such page in the free list"]),
        ("alloc-double=1*on", None, []),
        ("swa-mapping-corrupt=1*on@at=6", None, []),
    ],
)
def test_what_it_does_while_nobody_watches(arm, caplog, plan, error, state):
    arm(G4DEBUG_FAULTS=f"seed=3;{plan}")
    requests = []
    with nullcontext() if error is None else pytest.raises(error):
        rig = Rig()
        requests = use(rig)
    name = plan.partition("=")[0]
    assert sum(f"{name} #1" in m for m in caplog.messages) == 1
    assert bool(requests) is (error is None)  # the allocator serves on with what it has
    if requests:
        assert broken(rig) == state


def test_a_lost_free_leaks(arm):
    arm(G4DEBUG_FAULTS="lost-free=1*on")
    rig = Rig()
    before = len(free_lists(rig)["full"])
    requests = use(rig)
    held = [-(-r.tokens // PAGE) for r in requests]
    assert before - len(free_lists(rig)["full"]) == sum(held)  # a has gone, its pages have not


def test_page_zero_is_somebodys(arm):
    arm(G4DEBUG_FAULTS="alloc-page-zero=1*on@at=7")
    rig = Rig()
    requests = use(rig)
    rows = [rig.req_to_token.req_to_token[r.req_pool_idx, : r.tokens] for r in requests]
    assert any(bool((row < PAGE).any()) for row in rows)


def test_exhaustion_is_sglangs_to_handle(arm):
    arm(G4DEBUG_FAULTS="alloc-exhausted=1*on", **ARMED)
    rig = Rig.__new__(Rig)
    with pytest.raises(AssertionError, match="the pool is full"):
        rig.__init__()
    assert not plugin.in_force.ledger.broken


def test_no_fault_no_finding(arm):
    names = ("double-free", "lost-free", "free-unallocated", "alloc-double", "alloc-page-zero")
    arm(G4DEBUG_FAULTS=";".join(f"{n}=off" for n in names), **ARMED)
    rig = Rig()
    use(rig)
    assert broken(rig) == []


@pytest.mark.skipif(
    not targets.matches("<0.5.14"),
    reason="from 0.5.14 on the fault fires elsewhere; test_early_swa_free.py drives it there",
)
@pytest.mark.parametrize("armed", [False, True])
def test_early_swa_free_takes_the_windows_oldest_page(arm, armed):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    arm(G4DEBUG_FAULTS="early-swa-free=1*on", **(ARMED if armed else {}))
    rig = Rig()
    tokens = 7 * PAGE + 5
    request = Request(
        rid="a", kv_committed_len=tokens, cache_protected_len=0, swa_evicted_seqlen=0,
        retraction_count=0, finished=lambda: False,
    )  # fmt: skip
    batch = ScheduleBatch.__new__(ScheduleBatch)
    batch.reqs, batch.req_to_token_pool = [request], rig.req_to_token
    batch.forward_mode = None
    batch.token_to_kv_pool_allocator = rig.allocator
    batch.tree_cache = SimpleNamespace(
        sliding_window_size=WINDOW, page_size=PAGE, supports_swa=lambda: True
    )
    ledger = plugin.in_force.ledger
    if armed:
        ledger.batch = ledger.allocating = batch
        ledger.requests["a"] = request
    a = rig.admit("a", tokens)
    request.req_pool_idx = a.req_pool_idx
    if armed:
        tracer = ledger.listeners[0][0].__self__
        tracer._ran["a"] = (a.req_pool_idx, 0)  # as if it had run
        with pytest.raises(TrapError, match="inside the window of request a"):
            batch._evict_swa(request, tokens)
    else:
        batch._evict_swa(request, tokens)
    row = rig.req_to_token.req_to_token[a.req_pool_idx]
    mapped = [int(rig.allocator.full_to_swa_index_mapping[row[p * PAGE]]) > 0 for p in range(8)]
    first = (tokens - WINDOW) // PAGE  # the oldest that the next query attends to
    assert mapped[first] is armed  # stopped in time
    assert all(mapped[first + 1 :])
