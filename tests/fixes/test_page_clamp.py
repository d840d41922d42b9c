"""page-clamp on SGLang's real backend and pools; its engine runs are repro/page_clamp.py."""

from __future__ import annotations

import pytest
import torch
from real_backend import PAGE, SWA, Rig, draft_worker, dummy_pool

from g4debug.cpu import fault as device
from g4debug.fixes.base import state_of
from g4debug.fixes.page_clamp import FIX, still_broken

CLAMP = {"G4DEBUG_FIX_PAGE_CLAMP": "1"}
STALE = {"G4DEBUG_FAULTS": "stale-swa-state=on", "G4DEBUG_FIX_SWA_STATE_SWAP": "0"}


@pytest.mark.parametrize("clamped", [False, True])
def test_it_survives_on_somebody_elses_page(arm, clamped):
    """The draft's sliding layers get full-pool pages: a fault, or the pool's last page."""
    arm(**STALE, **(CLAMP if clamped else {}))
    rig = Rig()
    backend = rig.backend(draft=True)
    for tokens in (50, 100, 61):
        rig.admit(f"r{tokens}", tokens)
    worker, requests = draft_worker(rig, backend), rig.requests[1:]
    batch = rig.batch("decode", requests, backend, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    with worker._target_kv_pool_view(batch):
        rig.forward(backend, batch, save=False)
        sliding, full = rig.layers[0], rig.layers[2]
        handed = backend._get_layer_page_table(sliding, batch)
        untouched = backend._get_layer_page_table(full, batch)
    assert (device.pending() is None) is clamped
    device.clear()
    own = backend.forward_metadata.page_table
    live = [(r, c) for r, q in enumerate(requests) for c in range(-(-q.tokens // PAGE))]
    # A full layer's pages are all in its pool; what is beyond a row's length is anything.
    assert all(int(untouched[cell]) == int(own[cell]) for cell in live)
    if not clamped:
        assert handed is own
        return
    last = SWA // PAGE  # page 0 is reserved, so there is one more than tokens / page size
    assert handed.dtype == own.dtype
    assert max(int(own[cell]) for cell in live) > last
    assert torch.equal(handed, own.clamp(0, last))
    mapping = rig.allocator.full_to_swa_index_mapping
    assert all(int(handed[cell]) != int(mapping[int(own[cell]) * PAGE]) // PAGE for cell in live)


def test_a_table_that_is_right_stays_as_it_is(arm):
    arm(**CLAMP)
    rig = Rig()
    backend = rig.backend()
    request = rig.admit("r", 100)
    batch = rig.batch("decode", [request], backend)
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    for layer in rig.layers:
        table = metadata.swa_page_table if layer.layer_id in (0, 1, 3) else metadata.page_table
        live = -(-100 // PAGE)
        given = backend._get_layer_page_table(layer, batch)
        assert torch.equal(given[:, :live], table[:, :live])


@pytest.mark.parametrize(
    "tracer", [{"SGLANG_TRTLLM_MHA_DEBUG": "1"}, {"G4DEBUG_TRACE": "page-table"}]
)
def test_with_the_tracer_that_it_would_blind_it_is_refused(arm, tracer):
    with pytest.raises(SystemExit, match="G4DEBUG_FIX_PAGE_CLAMP=1 hides from the tracer"):
        arm(**CLAMP, **tracer)


def test_shipped_off(arm, capsys):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1")
    assert "page-clamp" not in capsys.readouterr().err
    assert state_of("page-clamp") == "off"
    assert FIX.purpose == "experiment"
    assert still_broken() is True
