"""The owners of allocated tokens, where a page is one token; real allocators, real hooks."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import releases
import torch

from g4debug.ledger.token_rows import TokenRows


class Request(SimpleNamespace):  # a plain namespace has no weak references to give
    pass


def batch(**fields):
    reqs = [Request(rid=rid, req_pool_idx=row) for row, rid in enumerate("abc", 1)]
    return SimpleNamespace(**{"reqs": reqs, "spec_info": None, **fields})


def told(shares):
    return [
        (s.rid, s.first, s.end, None if s.positions is None else s.positions.tolist())
        for s in shares
    ]


def test_a_prefill_gives_each_request_what_its_prompt_needs():
    rows = TokenRows(batch(prefix_lens=[5, 0, 2], extend_lens=[2, 3, 0]), "extend")
    assert told(rows.shares(5)) == [("a", 0, 2, [5, 6]), ("b", 2, 5, [0, 1, 2])]


def test_a_decode_gives_each_request_a_token():
    rows = TokenRows(batch(seq_lens_cpu=torch.tensor([7, 1, 4])), "decode")
    assert told(rows.shares(3)) == [("a", 0, 1, [7]), ("b", 1, 2, [1]), ("c", 2, 3, [4])]
    assert rows.shares(6) == ()  # speculative decoding v2 allocates ahead, as much as each needs


def test_a_verify_gives_each_request_room_for_its_drafts():
    rows = TokenRows(batch(seq_lens_cpu=torch.tensor([7, 1, 4])), "verify")
    assert told(rows.shares(6)) == [
        ("a", 0, 2, [7, 8]),
        ("b", 2, 4, [1, 2]),
        ("c", 4, 6, [4, 5]),
    ]


def test_of_a_tree_of_drafts_only_the_request_is_known():
    rows = TokenRows(
        batch(seq_lens_cpu=torch.tensor([7, 1, 4]), spec_info=SimpleNamespace(topk=2)), "verify"
    )
    assert told(rows.shares(3)) == [(rid, i, i + 1, None) for i, rid in enumerate("abc")]


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        (TokenRows(batch(prefix_lens=[5, 0, 2], extend_lens=[2, 3, 0]), "extend"), 6),
        (TokenRows(batch(prefix_lens=[5, 0], extend_lens=[2, 3]), "extend"), 5),
        (TokenRows(batch(seq_lens_cpu=torch.tensor([7, 1, 4])), "decode"), 4),
        (TokenRows(batch(seq_lens_cpu=torch.tensor([7, 1])), "decode"), 3),
        # The triton backend does not need them on the host, so under overlap SGLang has none.
        (TokenRows(batch(seq_lens_cpu=None), "decode"), 3),
        (TokenRows(batch(reqs=[], seq_lens_cpu=torch.tensor([])), "decode"), 3),
    ],
)
def test_where_the_numbers_do_not_add_up_nothing_is_concluded(rows, tokens):
    assert rows.shares(tokens) == ()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_the_ledger_knows_the_owners_in_both_pools(arm):
    from g4debug import plugin

    arm(G4DEBUG_TRACE="kv-allocator")
    ledger, hooks = plugin.in_force.ledger, plugin.in_force.hooks
    assert "ledger" in hooks.owners("worker.verify")
    pool = releases.swa_pool(40, 28, 1, 1, [0], [1])
    allocator = releases.allocator_class("swa.init")(40, 28, 1, torch.float32, "cpu", pool, False)

    def ask(kind, count, **fields):
        """Allocate from inside the site, as SGLang's batch does there."""
        (around,) = (
            entry.around
            for entry in hooks._entries[f"batch.prepare_for_{kind}"]
            if entry.around.__qualname__.startswith("LedgerHooks._during")
        )
        return around(lambda _: allocator.alloc(count), batch(**fields)).tolist()

    tokens = ask("extend", 5, prefix_lens=[5, 0, 2], extend_lens=[2, 3, 0])
    step = ask("decode", 3, seq_lens_cpu=torch.tensor([7, 3, 2]))
    alone = allocator.alloc(2).tolist()  # not from a batch
    for name in ("full", "swa"):
        known = ledger.pools[name]
        at = np.array(tokens + step + alone)
        if name == "swa":
            at = allocator.full_to_swa_index_mapping[torch.from_numpy(at)].numpy()
        assert known.owner[at].tolist() == [*"aabbb", *"abc", "", ""]
        assert known.position[at].tolist() == [5, 6, 0, 1, 2, 7, 3, 2, -1, -1]
        assert known.held[at].all()
    assert not ledger.broken


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_two_requests_with_the_same_rid_have_their_own_pages(arm):
    """Several tokenizer workers know nothing of each other's rids, so both may run at once."""
    from g4debug import plugin
    from g4debug.ledger.owners import place

    arm(G4DEBUG_TRACE="kv-allocator")
    ledger, hooks = plugin.in_force.ledger, plugin.in_force.hooks
    pool = releases.swa_pool(40, 28, 1, 1, [0], [1])
    allocator = releases.allocator_class("swa.init")(40, 28, 1, torch.float32, "cpu", pool, False)
    twins = batch(
        reqs=[Request(rid="a", req_pool_idx=1), Request(rid="a", req_pool_idx=2)],
        seq_lens_cpu=torch.tensor([7, 9]),
    )
    (around,) = (
        entry.around
        for entry in hooks._entries["batch.prepare_for_decode"]
        if entry.around.__qualname__.startswith("LedgerHooks._during")
    )
    tokens = around(lambda _: allocator.alloc(2), twins)
    assert ledger.owners.pages[tokens].tolist() == [place(1, 7), place(2, 9)]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_a_page_that_the_books_have_in_its_place_is_not_misplaced(arm):
    """A twin has ended, and the prefix cache keeps its page of the same place."""
    from g4debug import plugin
    from g4debug.sanitizer.confirm import Unconfirmed
    from g4debug.sanitizer.misplaced import misplaced

    arm(G4DEBUG_TRACE="kv-allocator")
    ledger = plugin.in_force.ledger
    pool = releases.swa_pool(40, 28, 1, 1, [0], [1])
    allocator = releases.allocator_class("swa.init")(40, 28, 1, torch.float32, "cpu", pool, False)
    its, page = allocator.alloc(2).tolist()
    full = ledger.pools["full"]
    full.owner[[its, page]], full.position[[its, page]] = "a", 7
    request = Request(
        rid="a", req_pool_idx=1, session=None, cache_protected_len=0, kv_allocated_len=8
    )
    ledger.requests["a"] = request
    rows = torch.zeros(3, 16, dtype=torch.int32)
    rows[1, 7] = page
    with pytest.raises(Unconfirmed, match="to this request for this place"):
        misplaced(ledger, 1, 7, page, "a", rows)
