"""An allocation returns the tokens of two rows in each other's place: one finding, and no doubt."""

from __future__ import annotations

import pytest
import torch
from real_backend import PAGE, Rig
from releases import kv_of

from g4debug import plugin
from g4debug.dumps import reading

pytestmark = pytest.mark.usefixtures("sglang")


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_token_in_an_old_page_and_a_new_page_are_exchanged(arm, monkeypatch, caplog, exchanged):
    """Row a goes on in its page, and row b needs a new one. Inside of all hooks they change."""
    pool = type(Rig().allocator.full_attn_allocator)
    own = pool.alloc_decode
    struck = []

    def alloc_decode(self, *args, **kwargs):
        out = own(self, *args, **kwargs)
        if exchanged and not struck:  # the SWA pool's call comes after this one
            struck.append(out.tolist())
            return out.flip(0)
        return out

    monkeypatch.setattr(pool, "alloc_decode", alloc_decode)
    folder = arm(G4DEBUG_TRACE="kv-allocator", G4DEBUG_MODE="log")
    rig, ledger = Rig(), plugin.in_force.ledger
    requests = [rig.admit("a", 3 * PAGE + 9), rig.admit("b", 2 * PAGE)]
    lengths = torch.tensor([request.tokens + 1 for request in requests])
    last = torch.stack(
        [
            rig.req_to_token.req_to_token[kv_of(request).req_pool_idx][request.tokens - 1]
            for request in requests
        ]
    ).to(torch.int64)
    rig.allocator.alloc_decode(lengths, lengths, last)
    found = [reading.read(path).finding for path in sorted(folder.glob("*.pt"))]
    assert not [line for line in caplog.messages if "in doubt" in line]
    assert not ledger.broken
    if not exchanged:
        assert found == []
        return
    old, new = (token // PAGE for token in struck[0])
    assert (found[0].check, found[0].kind) == ("kv-allocator", "double-alloc")
    assert f"FULL page {old} was handed out while it is held" in found[0].headline
    assert old != new
