"""What SGLang's ``trtllm_mha`` backend hands to an attention kernel, and where to read it.

``TRTLLMHAAttnBackend._get_layer_page_table`` returns the table that a layer's kernel gets; the
lengths that belong to it are in the backend's ``forward_metadata``.
"""

from __future__ import annotations

from typing import Any

import torch

BUILT = "attn.init"  # hook site: a backend is built for a ModelRunner
HANDED_OVER = "attn.layer_page_table"  # hook site: a layer's table goes to its kernel


def lengths(backend: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """seq_lens, int32 [rows]: tokens whose KV the kernel may read. And the running sum of the
    query lengths, int32 [rows + 1], or None for one query token per row."""
    metadata = backend.forward_metadata
    return metadata.cache_seqlens_int32, metadata.cu_seqlens_q


def window(layer: Any, pool_name: str) -> int:
    """Tokens to the left of a query token that the layer sees; -1 for a layer that sees all."""
    return -1 if pool_name == "full" else int(layer.sliding_window_size)


def padding(backend: Any, batch: Any, frozen: bool) -> int:
    """Length of a captured graph's padding rows. frozen: the backend of a FROZEN_KV_MTP draft.

    SGLang resets their lengths at each replay, but not their requests: those are an earlier
    batch's (cuda_graph_runner.py, ``populate_from_forward_batch``).
    """
    fill = int(backend.get_cuda_graph_seq_len_fill_value())
    mode = batch.forward_mode
    if mode.is_target_verify():
        return fill + int(backend.speculative_num_draft_tokens)
    # FROZEN_KV_MTP builds its draft's metadata as for a decode without speculation.
    plain = batch.spec_info is None or frozen
    if mode.is_decode_or_idle() and not plain:
        return fill + int(backend.speculative_step_id) + 1
    return fill


def forgot_swa(backend: Any) -> bool:
    """The backend does not know that its pool is a SWA pool: the upstream regression.

    Not told by use_sliding_window_kv_pool: in 0.5.13 that is False for every sound draft, whose
    own pool is the dummy.
    """
    return backend._swa_kv_pool is None


def swa_state(backend: Any) -> str:
    """In words, for a backend that forgot."""
    return f"use_sliding_window_kv_pool={backend.use_sliding_window_kv_pool}, _swa_kv_pool=None"
