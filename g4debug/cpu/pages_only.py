"""A toy model that computes nothing: it asks for pages and writes to their slots, as the whole one.

For replays in which only pages matter. Attention looks at each page that the kernel dereferences
and reads none; a layer's projections and MLP are left out. KV is written, all of it zero, to the
places at which SGLang wants it. So what depends on a number that a model computes says nothing,
and neither do the tracers that look at such numbers (``replay/run.py``).
"""

from __future__ import annotations

import importlib
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


def mlp(layer: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In place of ``Gemma4MLP.forward``."""
    return hidden_states


def install() -> None:
    """Leave out what a model computes, in this process."""
    model = importlib.import_module("sglang.srt.models.gemma4_causal")
    model.Gemma4Attention.forward = attention
    model.Gemma4MLP.forward = mlp
    paged_attention.attend_row = attend_row
