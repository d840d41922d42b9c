"""page-table on SGLang's TritonAttnBackend: the window of a decode, with the fix and without."""

from __future__ import annotations

import pytest
import torch
from real_backend import HEADS, draft_worker, dummy_pool
from real_triton import WIDE, TritonRig

from g4debug.dumps import reading

FAULT = {"G4DEBUG_FAULTS": "seed=1;draft-window-unfilled=on"}


@pytest.fixture
def found(arm):
    """The kinds that are found in a decode of three requests, two of them behind the window."""

    def decode(draft, **environ):
        folder = arm(G4DEBUG_TRACE="page-table", G4DEBUG_MODE="log", **environ)
        rig = TritonRig()
        requests = [rig.admit(f"r{n}", n) for n in (20, 60, 90)]
        backend = rig.backend(draft=draft)
        batch = rig.batch("decode", requests, backend, pool=dummy_pool() if draft else None)
        q, kv = torch.zeros(3, HEADS * WIDE), torch.zeros(3, 1, WIDE)
        with draft_worker(rig, backend)._target_kv_pool_view(batch):
            backend.init_forward_metadata(batch)
            for layer in rig.layers:
                backend.forward_decode(q, kv, kv, layer, batch, save_kv_cache=False)
        return {reading.read(path).finding.kind for path in folder.glob("*.pt")}

    return decode


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("fix", ["0", "1"])
def test_a_decode_with_the_whole_window_is_as_healthy_as_one_without(found, fix, draft):
    assert found(draft, G4DEBUG_FIX_TRITON_DECODE_WINDOW=fix) == set()


@pytest.mark.parametrize("fix", ["0", "1"])
def test_a_list_that_nobody_filled_in_is_found(found, fix):
    assert found(True, G4DEBUG_FIX_TRITON_DECODE_WINDOW=fix, **FAULT) == {"page-zero"}
