"""Whole pages of SGLang's full-to-SWA mapping that are exchanged: the mapping stays in order.

Each SWA page still belongs to one full page, so nothing of SGLang's contradicts anything else. Only
the ledger knows which page was handed out with which. It is believed if it missed no call.
"""

from __future__ import annotations

import pytest
import torch
from real_backend import PAGE
from served_rows import ARMED, Serving

from g4debug.trapping.trap import TrapError


def cells(it, page):
    return it.rig.allocator.full_to_swa_index_mapping[page * PAGE : (page + 1) * PAGE]


def exchange(it, one, two):
    first, second = cells(it, one).clone(), cells(it, two).clone()
    cells(it, one).copy_(second)
    cells(it, two).copy_(first)


def missed(it, pool):
    """Something happened to a free list that no hook saw."""
    allocator = getattr(it.rig.allocator, f"{pool}_attn_allocator")
    allocator.free_pages = allocator.free_pages.clone()


@pytest.fixture
def serving(arm):
    folder = arm(**ARMED)
    it = Serving()
    it.forward()
    it.cache(PAGE)  # and there is a scheduler, whose structures can be asked
    it.forward()
    return it, folder


@pytest.mark.parametrize("mode", ["decode", "target_verify", "extend"])
@pytest.mark.parametrize("other", [("b", 4), ("c", 3)], ids=["its own", "another's"])
def test_it_is_told_in_that_forward(serving, mode, other, caplog):
    it, _ = serving
    exchange(it, it.rig.page("b", 5), it.rig.page(*other))
    with pytest.raises(TrapError) as error:
        it.forward(mode)
    finding = error.value.finding
    assert finding.check == "page-table"
    assert finding.location.request in ("b", other[0])
    assert "mapping" in finding.cause
    assert not it.ledger.broken
    assert not any("in doubt" in line for line in caplog.messages)


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_a_ledger_that_missed_a_call_accuses_nobody(serving, pool, caplog):
    it, folder = serving
    missed(it, pool)
    exchange(it, it.rig.page("b", 5), it.rig.page("b", 4))
    it.forward()
    assert not list(folder.glob("*.pt"))
    assert any("in doubt" in line for line in caplog.messages)


def test_only_a_page_that_has_another_swa_page_was_overwritten(serving):
    """One that is evicted has none, and that is not for the mapping alone to tell."""
    it, _ = serving
    page, other = (it.rig.page("b", column) for column in (5, 4))
    full = torch.tensor([page, other]).numpy()
    assert not it.ledger.mapping_overwritten(full)
    cells(it, page).zero_()
    assert not it.ledger.mapping_overwritten(full)
    cells(it, page).copy_(cells(it, other))
    assert it.ledger.mapping_overwritten(full)
    it.ledger.pools["full"].held[page] = False
    assert not it.ledger.mapping_overwritten(full)
