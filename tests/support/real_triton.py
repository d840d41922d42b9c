"""A real TritonAttnBackend on the pools of ``real_backend``, and the keys that its kernels read.

The kernels are SGLang's own, in Triton's interpreter: the CPU engine's stand-ins are put aside.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest import mock

import releases
import torch
from real_backend import (
    CONTEXT,
    FULL,
    HEADS,
    LAYERS,
    PAGE,
    SPECULATIVE,
    SWA,
    WINDOW,
    Rig,
    capture_graph,
)

from g4debug.cpu import token_attention
from g4debug.hooking import targets

WIDE = 64  # a head has a channel of its own for each token of a request
KERNELS = (
    "sglang.srt.layers.attention.triton_ops"
    if targets.matches("<0.5.18")
    else "sglang.kernels.ops.attention"
)
SERVER = {
    **SPECULATIVE,
    "speculative_num_steps": 3,
    "page_size": PAGE,
    "disable_cuda_graph": False,
    "chunked_prefill_size": 128,
    "enable_deterministic_inference": False,
    "triton_attention_num_kv_splits": 4,
    "triton_attention_split_tile_size": None,
}


def sglangs(name: str) -> Any:
    """SGLang's own function, from a copy of its module: in SGLang's, the stand-in is in place."""
    spec = importlib.util.find_spec(f"{KERNELS}.{name.removesuffix('_fwd')}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert getattr(module, name) is not getattr(token_attention, name)
    return getattr(module, name)


class TritonRig(Rig):
    """Requests of at most ``WIDE`` tokens, if their keys are asked for."""

    def __init__(self) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__()
        releases.configure(**SERVER)
        self.layers = [
            RadixAttention(
                HEADS, WIDE, WIDE**-0.5, 1, i, sliding_window_size=WINDOW - 1 if sliding else -1
            )
            for i, sliding in self.sliding.items()
        ]

    def pools(self) -> tuple[Any, Any]:
        sliding = [i for i, s in LAYERS.items() if s]
        whole = [i for i in LAYERS if i not in sliding]
        pool = releases.swa_pool(FULL, SWA, PAGE, WIDE, sliding, whole)
        new = releases.allocator_class("swa.init")
        return pool, new(FULL, SWA, PAGE, torch.float32, "cpu", pool, False)

    def runner(self, draft: bool = False) -> Any:
        from sglang.srt.configs.model_config import AttentionArch
        from transformers import PretrainedConfig

        made = super().runner(draft)
        made.sliding_window_size = WINDOW - 1
        made.gpu_id = 0
        made.dcp_size, made.dcp_rank = 1, 0
        made.hybrid_gdn_config = made.kimi_linear_config = made.linear_attn_model_spec = None
        made.decode_num_tokens_per_req = lambda: 4
        made.model_config = SimpleNamespace(
            **{**vars(made.model_config), "head_dim": WIDE},
            attention_arch=AttentionArch.MHA,
            v_head_dim=WIDE,
            swa_v_head_dim=WIDE,
            is_encoder_decoder=False,
            linear_attn_registry_result=None,
            hf_config=PretrainedConfig(architectures=["Gemma4ForCausalLM"]),
            hf_text_config=PretrainedConfig(),
            get_num_kv_heads=lambda *args: 1,
            get_max_num_attention_heads=lambda: HEADS,
        )
        made.server_args = SimpleNamespace(**{**vars(made.server_args), **SERVER})
        return made

    def backend(self, draft: bool = False) -> Any:
        from sglang.srt.layers.attention import triton_backend

        one = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0)
        asked = {"get_attention_tp_size": lambda: 1, "get_parallel": lambda: one}
        here = {name: way for name, way in asked.items() if hasattr(triton_backend, name)}
        with mock.patch.multiple(triton_backend, **here):  # one rank, of no group
            made = triton_backend.TritonAttnBackend(self.runner(draft))
        if not hasattr(made, "token_to_kv_pool"):
            made.token_to_kv_pool = self.pool
        return made

    def capture(self, backend: Any, size: int) -> None:
        """A graph of ``size`` rows, captured on rows of one token as SGLang does."""
        backend.init_cuda_graph_state(size, size)
        capture_graph(backend, self.batch("decode", [self.admit("captured", 1)] * size, backend))

    def batch(self, mode: str, requests: list[Any], backend: Any, pool: Any = None) -> Any:
        made = super().batch(mode, requests, backend, pool)
        if mode == "extend":
            made.extend_prefix_lens = made.seq_lens - made.extend_seq_lens
        return made

    def keys(self, backend: Any, mode: str, request: Any, layer: int = 0) -> list[list[int]]:
        """The positions that each query of one forward sees in a layer, by what comes out of it.

        All keys are alike, so a query weighs what it sees alike; the value of position p is channel
        p alone. mode: decode, or extend, which has ten queries.
        """
        assert request.tokens <= WIDE
        backend.decode_attention_fwd = sglangs("decode_attention_fwd")
        backend.extend_attention_fwd = sglangs("extend_attention_fwd")
        asked = self.layers[layer]
        batch = self.batch(mode, [request], backend)
        row = self.req_to_token.req_to_token[request.req_pool_idx, : request.tokens].long()
        values = torch.eye(WIDE)[: request.tokens, None]
        releases.write_kv(self.pool, asked, row, torch.zeros_like(values), values)
        backend.init_forward_metadata(batch)
        new = len(batch.out_cache_loc)
        (out,) = self.attend(backend, batch, asked, values[-new:])
        return [(o > 0).nonzero().flatten().tolist() for o in out.view(new, HEADS, WIDE)[:, 0]]

    def attend(self, backend: Any, batch: Any, layer: Any, values: torch.Tensor) -> list[Any]:
        """One layer of a forward in which all queries and keys are zeros."""
        new = len(values)
        decode = batch.forward_mode.is_decode_or_idle()
        call = backend.forward_decode if decode else backend.forward_extend
        return [
            call(torch.zeros(new, HEADS * WIDE), torch.zeros_like(values), values, layer, batch)
        ]


def listed(rig: Rig, backend: Any, request: Any, row: int = 0) -> list[int]:
    """The positions of a request that the window list of a row names, by their SWA slots."""
    metadata = backend.forward_metadata
    begin, end = (int(n) for n in metadata.window_kv_indptr[row : row + 2])
    table = rig.req_to_token.req_to_token[request.req_pool_idx, : min(request.tokens, CONTEXT)]
    slots = rig.allocator.full_to_swa_index_mapping[table.long()].tolist()
    return [slots.index(int(slot)) for slot in metadata.window_kv_indices[begin:end]]
