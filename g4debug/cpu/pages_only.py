"""A toy model that computes nothing: it asks for pages and writes to their slots, as the whole one.

For replays in which only pages matter. Attention looks at each page that the kernel dereferences
and reads none; a layer's projections and MLP are left out. KV is written, all of it zero, to the
places at which SGLang wants it. So what depends on a number that a model computes says nothing:
`CONTENT` are the tracers that look at such numbers.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from g4debug.cpu import fault, paged_attention

CONTENT = frozenset({"kv-integrity"})


def attend(
    kernel: str,
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: list[int],
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """In place of ``paged_attention.attend``: the same faults, and zeros."""
    num_pages, _, page, _ = kv_cache[0].shape
    if out is None:
        shape = (*query.shape[:2], kv_cache[1].shape[-1])
        out = torch.zeros(shape, dtype=out_dtype or query.dtype)
    else:
        out.zero_()
    table = block_tables.tolist()
    for row, tokens in enumerate(seq_lens.tolist()):
        queries = starts[row + 1] - starts[row]
        if queries <= 0 or tokens <= 0:
            continue
        columns = paged_attention.live_columns(tokens, queries, page, window_left)
        bad = paged_attention.first_bad(table[row], columns, num_pages)
        if bad is not None:
            fault.record(fault.DeviceFault(kernel, row, *bad, num_pages, window_left))
    return out


def attention(
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    forward_batch: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """In place of ``Gemma4Attention.forward``: no projections, no norms."""
    tokens, shared = hidden_states.shape[0], layer.is_kv_shared_layer
    query = hidden_states.new_zeros(tokens, layer.num_heads, layer.head_dim)
    kv = None if shared else hidden_states.new_zeros(tokens, layer.num_kv_heads, layer.head_dim)
    layer.attn(query, kv, kv, forward_batch=forward_batch, save_kv_cache=not shared)
    return hidden_states


def mlp(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``Gemma4MLP.forward``."""
    return hidden_states


def install() -> None:
    """Leave out what a model computes, in this process."""
    model = importlib.import_module("sglang.srt.models.gemma4_causal")
    model.Gemma4Attention.forward = attention
    model.Gemma4MLP.forward = mlp
    paged_attention.attend = attend
