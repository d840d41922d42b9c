"""A model without sliding layers: SGLang's paged allocator alone, and a page that is free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import FULL, PAGE, PlainRig, allocator_class

from g4debug import plugin
from g4debug.cpu import fault
from g4debug.ledger import shadow as shadows
from g4debug.trapping.trap import TrapError

TOKENS = {"a": 50, "b": 100, "c": 61}


@pytest.fixture
def rig(arm):
    """Three requests; the ledger knows by name who has their pages."""
    arm(G4DEBUG_TRACE="page-table")
    rig = PlainRig()
    recorder = plugin.in_force.recorder
    for rid, tokens in TOKENS.items():
        ledger = plugin.in_force.ledger
        ledger.batch = ledger.allocating = SimpleNamespace(reqs=[SimpleNamespace(rid=rid)])
        rig.admit(rid, tokens)
    ledger.batch = ledger.allocating = None
    recorder._rids = {r.req_pool_idx: r.rid for r in rig.requests}
    return rig


def agree(rig):
    """The ledger, its shadow and SGLang's own list say the same of every page."""
    ledger, allocator = plugin.in_force.ledger, rig.allocator
    lists = (allocator.free_pages, getattr(allocator, "release_pages", None))
    free = {page for pages in lists if pages is not None for page in pages.tolist()}
    held = set(range(1, allocator.num_pages + 1)) - free
    assert list(ledger.pools) == ["full"]
    assert set(ledger.pools["full"].held.nonzero()[0].tolist()) == held
    words = ledger.shadow[:-1].tolist()
    assert {p for p, word in enumerate(words) if p and word == shadows.HELD} == held
    assert {p for p, word in enumerate(words) if p and word == shadows.FREE} == free
    assert int(ledger.shadow[-1]) == 1
    assert not ledger.broken


def tokens_of(rig, rid):
    request = next(r for r in rig.requests if r.rid == rid)
    row = rig.req_to_token.req_to_token[request.req_pool_idx]
    return row[: request.tokens].to(torch.int64)


def found(rig, mode="decode"):
    with pytest.raises(TrapError) as error:
        rig.step(rig.backend(), mode, rig.requests[1:])
    return error.value.finding


def grow(rig, rids):
    """One more token for each; a request with a full page gets a new one."""
    lengths = torch.tensor([len(tokens_of(rig, rid)) + 1 for rid in rids])
    last = torch.stack([tokens_of(rig, rid)[-1] for rid in rids])
    rig.allocator.alloc_decode(lengths, lengths, last)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_a_sound_server_is_silent_and_the_shadow_is_sglangs_own_list(rig, mode):
    backend = rig.backend()
    assert not backend.use_sliding_window_kv_pool
    rig.step(backend, mode, rig.requests[1:])
    assert fault.pending() is None
    agree(rig)


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
def test_a_page_that_was_given_back_is_not_read(rig, mode):
    page = rig.page("b", 5)
    rig.allocator.free(torch.arange(page * PAGE, (page + 1) * PAGE))
    finding = found(rig, mode)
    assert finding.kind == "use-after-free"
    assert f"reads full-pool page {page}, which is free" in finding.headline
    assert (finding.location.request, finding.location.column) == ("b", 5)
    assert "request b had it last" in finding.owner
    assert " free " in finding.history[-1]
    agree(rig)


def test_a_page_that_went_to_somebody_else_is_found_in_his_table(rig):
    backend = rig.backend()
    batch = rig.batch("decode", rig.requests[1:], backend)
    backend.init_forward_metadata(batch)
    backend.forward_metadata.page_table[1, 6] = rig.page("a", 0)
    with pytest.raises(TrapError) as error:
        rig.forward(backend, batch)
    assert error.value.finding.kind == "other-request"
    assert "of request a" in error.value.finding.headline


def test_a_request_that_goes_on_in_a_free_page_does_not_make_it_look_held(rig):
    """In the same allocation another row gets a page, and that one is held."""
    page = rig.page("a", 3)
    rig.allocator.free(tokens_of(rig, "a")[3 * PAGE :])
    rig.allocator.free_pages = rig.allocator.free_pages.roll(-1)  # c does not get this one
    rig.requests[-1].tokens = 3 * PAGE  # c is about to need a new page
    grow(rig, ["a", "c"])
    shadow = plugin.in_force.ledger.shadow
    assert int(shadow[page]) == shadows.FREE
    agree(rig)  # c's is held
    rig.requests[-1].tokens = TOKENS["c"]
    assert found(rig).kind == "use-after-free"


def test_every_way_in_and_out(rig):
    whole = rig.allocator.alloc(3 * PAGE)  # as HiCache loads back
    agree(rig)
    spare = whole[:0]
    if hasattr(rig.allocator, "backup_state"):  # until 0.5.17
        saved = rig.allocator.backup_state()
        spare = rig.allocator.alloc(2 * PAGE)
        agree(rig)
        rig.allocator.restore_state(saved)
        agree(rig)
    assert rig.allocator.alloc(2 * FULL) is None
    rig.allocator.free_group_begin()
    rig.allocator.free(whole)
    agree(rig)
    rig.allocator.free_group_end()
    agree(rig)
    again = rig.allocator.alloc(2 * PAGE)
    assert set(again.tolist()) & {*spare.tolist(), *whole.tolist()}
    agree(rig)
    rig.allocator.clear()
    agree(rig)


def test_an_allocator_that_the_hooks_do_not_see_is_judged_by_nobody(arm, caplog):
    """A platform's own subclass: pages that it hands out are not known, and no page is free."""
    arm(G4DEBUG_TRACE="page-table")
    paged = allocator_class("pool.init")

    class Theirs(paged):
        def alloc_extend(self, *args, **kwargs):
            return paged.alloc_extend.__wrapped__(self, *args, **kwargs)

    class TheirRig(PlainRig):
        def pools(self):
            pool, _ = super().pools()
            plugin.in_force.ledger.pools.clear()
            return pool, Theirs(2 * FULL, PAGE, torch.float32, "cpu", pool, False)

    rig = TheirRig()
    rig.admit("a", 50)
    assert plugin.in_force.ledger.shadow is None
    rig.step(rig.backend(), "decode", rig.requests[1:])
    assert fault.pending() is None
    (said,) = [m for m in caplog.messages if "Theirs" in m]
    assert "cannot tell which pages of a page table are free" in said
