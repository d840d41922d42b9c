"""What SGLang's ``trtllm_mha`` backend hands to an attention kernel, and where to read that.

``TRTLLMHAAttnBackend._get_layer_page_table`` returns the table that the kernel of a layer gets.
The lengths that belong to the table are in the backend's ``forward_metadata``.
"""

from __future__ import annotations

from typing import Any

import torch

BUILT = "attn.init"  # hook site: a backend is built for a ModelRunner
HANDED_OVER = "attn.layer_page_table"  # hook site: a layer's table goes to its kernel


def lengths(backend: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(seq_lens, running sum of the query lengths) of the tables of this forward.

    seq_lens: int32 [rows], the number of tokens whose KV the kernel may read. The running sum:
    int32 [rows + 1], or None for one query token in each row.
    """
    metadata = backend.forward_metadata
    return metadata.cache_seqlens_int32, metadata.cu_seqlens_q


def window(layer: Any, pool_name: str) -> int:
    """How many tokens before a query token the layer sees; -1 if it sees all of them."""
    return -1 if pool_name == "full" else int(layer.sliding_window_size)


def padding(backend: Any, batch: Any, frozen: bool) -> int:
    """The length of the padding rows in a captured CUDA graph.

    frozen: this is the backend of a FROZEN_KV_MTP draft. Before each replay SGLang resets the
    lengths of the padding rows, but not their requests, which are those of an earlier batch
    (cuda_graph_runner.py, ``populate_from_forward_batch``).
    """
    fill = int(backend.get_cuda_graph_seq_len_fill_value())
    mode = batch.forward_mode
    if mode.is_target_verify():
        return fill + int(backend.speculative_num_draft_tokens)
    # FROZEN_KV_MTP builds the metadata of its draft as for a decode without speculation.
    plain = batch.spec_info is None or frozen
    if mode.is_decode_or_idle() and not plain:
        return fill + int(backend.speculative_step_id) + 1
    return fill


def forgot_swa(backend: Any) -> bool:
    """True if the backend does not know that its pool is a SWA pool: the upstream regression.

    ``use_sliding_window_kv_pool`` does not tell this: in 0.5.13 it is False for every sound draft,
    because a draft's own pool is a dummy.
    """
    return backend._swa_kv_pool is None


def swa_state(backend: Any) -> str:
    """The backend's fields that show it, for the report."""
    return f"use_sliding_window_kv_pool={backend.use_sliding_window_kv_pool}, _swa_kv_pool=None"
