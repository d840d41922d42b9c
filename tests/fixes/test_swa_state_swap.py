"""swa-state-swap on SGLang's real backend, pools and FROZEN_KV_MTP views."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from real_backend import PlainRig, Rig, draft_worker, dummy_pool, recorded, swa_pool
from sglang_of import sglang_of

from g4debug.cpu import fault as device
from g4debug.fixes import swa_state_swap
from g4debug.fixes.swa_state_swap import backends_of, still_broken, swa_state_of
from g4debug.hooking import targets

STALE = {"G4DEBUG_FAULTS": "stale-swa-state=on"}
OFF = {"G4DEBUG_FIX_SWA_STATE_SWAP": "0"}


def state(backend):
    return backend.use_sliding_window_kv_pool, backend._swa_kv_pool


def draft_of(rig):
    """A draft's backend in the state that the regression left it in, and its worker."""
    backend = rig.backend(draft=True)
    for tokens in (50, 100, 61):
        rig.admit(f"r{tokens}", tokens)
    return backend, draft_worker(rig, backend), rig.requests[1:]


def expected_tables(rig, requests, columns):
    """Full and SWA pages of each row, from the request table and the allocator's mapping."""
    full = torch.zeros(len(requests), columns, dtype=torch.int64)
    swa = torch.zeros_like(full)
    for row, request in enumerate(requests):
        for column in range(-(-request.tokens // 16)):
            token = int(rig.req_to_token.req_to_token[request.req_pool_idx, column * 16])
            full[row, column] = token // 16
            swa[row, column] = int(rig.allocator.full_to_swa_index_mapping[token]) // 16
    return full, swa


def live_cells(requests, columns):
    lengths = torch.tensor([-(-request.tokens // 16) for request in requests])
    return torch.arange(columns) < lengths[:, None]


def test_the_released_backend_does_not_have_the_bug(sglang):
    assert still_broken() is False


BROKEN = """
class Base:
    def __init__(self, model_runner):
        pool = model_runner.token_to_kv_pool
        self.use_sliding_window_kv_pool = isinstance(pool, SWAKVPool)

class TRTLLMHAAttnBackend(Base):
    {more}
"""


@pytest.mark.parametrize(
    ("more", "broken"),
    [
        ("pass", True),
        ("def _resolve_swa_kv_pool(self): ...", False),  # upstream's own fix
        ("def __init__(self): self.use_sliding_window_kv_pool = token_to_kv_pool_allocator", False),
        ("def __init__(self): ...", False),
    ],
)
def test_a_backend_that_asks_its_own_pool_has_it(tmp_path, more, broken):
    """As upstream was between #25103 and #26966."""
    backend = BROKEN.format(more=more)
    with sglang_of(tmp_path, {"sglang/srt/layers/attention/trtllm_mha_backend.py": backend}):
        assert still_broken() is broken


def test_state_follows_the_pool_and_comes_back(sglang):
    rig = Rig()
    backend = rig.backend(draft=True)
    backend.use_sliding_window_kv_pool, backend._swa_kv_pool = False, None
    other = swa_pool(64, 64)
    with swa_state_of(backend, rig.pool):
        assert state(backend) == (True, rig.pool)
        with swa_state_of(backend, other):
            assert state(backend) == (True, other)
            with swa_state_of(backend, object()):  # a pool without a window
                assert state(backend) == (False, None)
            assert state(backend) == (True, other)
        assert state(backend) == (True, rig.pool)
    assert state(backend) == (False, None)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_state_comes_back_whatever_is_raised(sglang, error):
    rig = Rig()
    backend = rig.backend()
    before = state(backend)
    inside = []

    def body():
        with swa_state_of(backend, None):
            inside.append(state(backend))
            raise error

    with pytest.raises(error):
        body()
    assert inside == [(False, None)]
    assert state(backend) == before == (True, rig.pool)


def test_the_backends_inside_a_hybrid_one_are_reached(sglang):
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    rig = Rig()
    other = SimpleNamespace(needs_cpu_seq_lens=False)  # triton caches no such state
    untouched, inner = dict(vars(other)), rig.backend(draft=True)
    inner.use_sliding_window_kv_pool, inner._swa_kv_pool = False, None
    hybrid = HybridAttnBackend(rig.runner(draft=True), other, inner)
    assert backends_of(hybrid) == (inner,)
    both = HybridAttnBackend(rig.runner(), rig.backend(), inner)
    assert len(backends_of(both)) == 2
    with swa_state_of(hybrid, rig.pool):
        assert state(inner) == (True, rig.pool)
        assert vars(other) == untouched
    assert state(inner) == (False, None)
    assert backends_of(other) == backends_of(None) == ()


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_drafts_forward(arm, fixed, hybrid):
    """Eager: without the fix the sliding layers read full-pool pages, with it SWA pages."""
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    arm(**STALE, **({} if fixed else OFF))
    rig = Rig()
    backend, worker, requests = draft_of(rig)
    if hybrid:
        worker.draft_attn_backend = HybridAttnBackend(
            rig.runner(draft=True), SimpleNamespace(needs_cpu_seq_lens=False), backend
        )
    batch = rig.batch("decode", requests, backend, pool=dummy_pool())
    worker._init_frozen_kv_metadata(batch)
    assert state(backend) == (False, None)
    with worker._target_kv_pool_view(batch):
        assert state(backend) == ((True, rig.pool) if fixed else (False, None))
        rig.forward(backend, batch, save=False)
    assert state(backend) == (False, None)
    assert (device.pending() is None) is fixed
    device.clear()
    full, swa = expected_tables(rig, requests, 7)
    live = live_cells(requests, 7)  # beyond them is what the release leaves there
    assert torch.equal(backend.forward_metadata.page_table[:, :7].long()[live], full[live])
    if fixed:
        assert torch.equal(backend.forward_metadata.swa_page_table[:, :7].long()[live], swa[live])
    else:
        assert backend.forward_metadata.swa_page_table is None


@pytest.mark.parametrize("fixed", [False, True])
def test_the_drafts_cuda_graph(arm, fixed):
    """What FrozenKVMTPCudaGraphRunner calls: state at start, capture, replay of another batch."""
    arm(**STALE, **({} if fixed else OFF))
    rig = Rig()
    backend, worker, requests = draft_of(rig)
    backend.init_cuda_graph_state(4, 4)  # outside any view
    static = backend.decode_cuda_graph_metadata["swa_page_table"]
    assert (static is not None) is fixed

    captured = rig.batch("decode", requests, backend)
    captured.positions = torch.zeros(3, dtype=torch.int64)
    captured.seq_lens = captured.seq_lens_cpu = torch.ones(3, dtype=torch.int64)
    captured.req_pool_indices = torch.zeros(3, dtype=torch.int64)
    worker._init_frozen_kv_metadata_capture_cuda_graph(captured)
    metadata = backend.forward_metadata
    assert (metadata.swa_page_table is not None) is fixed
    with worker._target_kv_pool_view(captured):
        handed = {
            layer.layer_id: backend._get_layer_page_table(layer, captured) for layer in rig.layers
        }
    sliding, full_layer = handed[0], handed[2]
    assert full_layer is metadata.page_table
    assert sliding is (metadata.swa_page_table if fixed else metadata.page_table)
    if fixed:
        assert sliding.data_ptr() == static.data_ptr()

    batch = rig.batch("decode", requests, backend)
    worker._init_frozen_kv_metadata_replay_cuda_graph(batch, 3, int(batch.seq_lens.sum()))
    full, swa = expected_tables(rig, requests, 7)
    with worker._frozen_kv_target_view(batch):
        recorded(backend, batch)
    live = live_cells(requests, 7)
    assert torch.equal(full_layer[:, :7].long()[live], full[live])
    assert torch.equal(sliding[:, :7].long()[live], (swa if fixed else full)[live])
    assert not torch.equal(swa, full)
    assert state(backend) == (False, None)


@pytest.mark.parametrize("fixed", [False, True])
def test_only_a_target_with_a_window_gets_a_swa_buffer(arm, fixed):
    arm(**STALE, **({} if fixed else OFF))
    rig = Rig()
    draft, target = rig.backend(draft=True), rig.backend()
    assert (draft._alloc_swa_page_table(2, 3) is not None) is fixed
    assert target._alloc_swa_page_table(2, 3).shape == (2, 3)
    plain = PlainRig()  # a model without sliding layers
    assert type(target)(plain.runner())._alloc_swa_page_table(2, 3) is None
    if fixed:
        buffer = draft._alloc_swa_page_table(2, 3)
        assert (buffer.shape, buffer.dtype, int(buffer.sum())) == ((2, 3), torch.int32, 0)


def test_a_view_that_fails_leaves_the_state(arm):
    """Before the assistant is bound, SGLang's view raises; so must ours, and touch nothing."""
    arm(**STALE)
    rig = Rig()
    backend, worker, requests = draft_of(rig)
    worker.kv_context = None
    batch = rig.batch("decode", requests, backend)
    with pytest.raises(RuntimeError, match="before the model was bound"):
        worker._init_frozen_kv_metadata(batch)
    assert state(backend) == (False, None)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, False),
        (STALE, True),
        ({**STALE, **OFF}, False),
        ({"G4DEBUG_FIX_SWA_STATE_SWAP": "1"}, True),
    ],
)
def test_states_are_announced(arm, capsys, environ, says):
    arm(SGLANG_TRTLLM_MHA_DEBUG="1", **environ)
    line = re.search(r"fixes: \d+ in force \((.*?)\)(.*)", capsys.readouterr().err)
    assert ("swa-state-swap" in line[1].split(", ")) is says
    assert ("1 switched off" in line[2]) is (OFF.items() <= environ.items())


def test_it_hooks_nothing_where_it_is_not_needed(arm):
    from sglang.srt.plugins.hook_registry import HookRegistry

    arm()
    sites = (
        "worker.frozen_view",
        "worker.pool_view",
        "attn.trtllm_mha.alloc_swa_page_table",
        "attn.trtllm_mha.init",
    )
    assert not {targets.path(site) for site in sites} & set(HookRegistry._hooks)
    assert swa_state_swap.FIX.needs
