"""A toy model that computes nothing: it asks for pages and writes to their slots, as the whole one.

For replays in which only pages matter. Attention looks at each page that the kernel dereferences
and reads none; a layer's projections and MLP are left out. KV is written, all of it zero, to the
places at which SGLang wants it. So what depends on a number that a model computes says nothing,
and neither do the tracers that look at such numbers (``replay/run.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from g4debug.cpu import paged_attention


def attend_row(*args: Any, **kwargs: Any) -> None:
    """In place of ``paged_attention.attend_row``. Faults are looked for before, and out is zero."""


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


def llama(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> torch.Tensor:
    """In place of ``LlamaAttention.forward``. EAGLE3's draft gives it two vectors of a token."""
    tokens, size = hidden_states.shape[0], layer.head_dim
    kv = hidden_states.new_zeros(tokens, layer.num_kv_heads * size)
    layer.attn(hidden_states.new_zeros(tokens, layer.num_heads * size), kv, kv, forward_batch)
    return hidden_states[:, : layer.hidden_size]


def mlp(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of the ``forward`` of an MLP."""
    return hidden_states


PLACES: Mapping[str, Mapping[str, Callable[..., torch.Tensor]]] = {
    "sglang.srt.models.gemma4_causal": {"Gemma4Attention": attention, "Gemma4MLP": mlp},
    "sglang.srt.models.llama": {"LlamaAttention": llama, "LlamaMLP": mlp},
}


def install() -> None:
    """Leave out what a model computes, in this process.

    The toys of DeepSeek and Gemma-3 compute their projections all the same, and nobody looks at it.
    """
    for name, classes in PLACES.items():
        module = importlib.import_module(name)
        for cls, function in classes.items():
            getattr(module, cls).forward = function
    paged_attention.attend_row = attend_row
