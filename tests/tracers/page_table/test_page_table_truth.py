"""What a table is held against: the layer's own pool, and no row that is only padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from real_backend import LAYERS, PAGE, Rig, capture_graph, replay_graph

from g4debug.backends import adapter
from g4debug.hooking.layer_pools import pages_of, pool_of_layer
from g4debug.sanitizer.backend_state import BackendState
from g4debug.sanitizer.forward_snapshots import ForwardSnapshots
from g4debug.sanitizer.unsupported import moving_pages


def test_the_pool_is_the_layers_own(sglang):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    rig = Rig()
    batch = SimpleNamespace(token_to_kv_pool=rig.pool)
    for layer in rig.layers:
        pool, name = pool_of_layer(None, layer, batch)
        k, _ = rig.pool.get_kv_buffer(layer.layer_id)
        assert name == ("swa" if LAYERS[layer.layer_id] else "full")
        assert pages_of(pool, layer, PAGE) == k.shape[0] // PAGE
        later = SimpleNamespace(token_to_kv_pool=rig.pool)  # where 0.5.13 shows it
        assert pool_of_layer(later, layer, SimpleNamespace()) == (pool, name)
    plain = MHATokenToKVPool(160, PAGE, torch.float32, 1, 8, 5, "cpu", False)
    pool, name = pool_of_layer(None, rig.layers[0], SimpleNamespace(token_to_kv_pool=plain))
    assert (pool, name, pages_of(pool, rig.layers[0], PAGE)) == (plain, "full", 11)


@pytest.mark.parametrize(
    ("mode", "draft", "algorithm", "spec"),
    [
        ("decode", False, "FROZEN_KV_MTP", False),
        ("decode", False, None, False),
        ("decode", True, "FROZEN_KV_MTP", True),
        ("decode", True, "EAGLE", True),
        ("target_verify", False, "FROZEN_KV_MTP", False),
        ("target_verify", False, None, False),  # a draft verifies nothing
    ],
)
def test_padding_is_as_long_as_sglang_makes_it(sglang, mode, draft, algorithm, spec):
    """Against the lengths that SGLang's own capture and replay give rows of the fill value."""
    rig = Rig()
    rig.admit("a", 60)
    runner = rig.runner(draft)
    runner.server_args.speculative_algorithm = algorithm
    rig.runner = lambda draft=False: runner
    backend = rig.backend(draft)
    state = BackendState(None, ForwardSnapshots())
    state.learn(backend, runner, PAGE)
    batch = rig.batch(mode, [rig.requests[-1]], backend)
    batch.spec_info = object() if spec else None
    mha = adapter("trtllm_mha")
    rows = mha.indices(backend, batch)
    padding = mha.padding(backend, batch, state.is_frozen(backend))
    truth = state.truth(backend, batch, rows, 1, "full", padding)
    backend.init_cuda_graph_state(2, 8)
    fill = backend.get_cuda_graph_seq_len_fill_value()
    lengths = batch.seq_lens.clone().fill_(fill)
    # FROZEN_KV_MTP shows the backend no spec_info: frozen_kv_mtp_worker.py,
    # _init_frozen_kv_metadata_replay_cuda_graph.
    seen = None if algorithm == "FROZEN_KV_MTP" else batch.spec_info
    graph = rig.batch(mode, [rig.requests[-1]], backend)
    graph.seq_lens = graph.seq_lens_cpu = lengths
    graph.spec_info = seen
    capture_graph(backend, graph)
    replay_graph(backend, graph)
    assert truth.padding == int(backend.forward_metadata.cache_seqlens_int32[0])
    assert state.truth(backend, batch, rows, 1, "full", 0).padding == 0
    assert state.truth(backend, batch, rows, 2, "full", padding) is None  # rows without a request


def test_the_limits_of_real_server_arguments(sglang):
    from sglang.srt.server_args import ServerArgs

    fields = getattr(ServerArgs, "__dataclass_fields__", None)
    if fields is None:  # from 0.5.23 on it is no dataclass
        args = ServerArgs(model_path="none")
    else:
        args = SimpleNamespace(**{name: field.default for name, field in fields.items()})
    assert len(moving_pages(args)) == 1  # SGLang's default is overlap scheduling
    args.disable_overlap_schedule = True
    assert moving_pages(args) == []
    args.disaggregation_mode, args.enable_pdmux = "prefill", True
    assert len(moving_pages(args)) == 2


def test_with_pipeline_parallelism_only_ranges_are_checked(sglang):
    """SGLang launches a prompt's next chunk while the forward of the one before still runs."""
    rig = Rig()
    rig.admit("a", 60)
    runner = rig.runner()
    runner.server_args.pp_size = 2
    backend, state = rig.backend(), BackendState(None, ForwardSnapshots())
    state.learn(backend, runner, PAGE)
    batch = rig.batch("decode", [rig.requests[-1]], backend)
    assert not state.judges(backend)
    assert state.truth(backend, batch, batch.req_pool_indices, 1, "full", 0) is None
    assert ["pipeline parallelism" in why for why in state.limits] == [True]
