"""The decoder layer of Gemma-4, with our kernels for its pointwise operations.

It computes what Gemma-4 computes, in the same order. Source: ``Gemma4DecoderLayer`` of SGLang and
of Hugging Face. When SGLang builds piecewise CUDA graphs, torch.compile traces these functions. The
kernels are then called through ops that it does not look into.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.fixes.paths.base import eps_of
from g4debug.fixes.paths.kernels import gelu_mul, rmsnorm_add, triple_rmsnorm


def ple_forward(
    layer: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    per_layer_input: torch.Tensor,
    forward_batch: Any,
) -> tuple[torch.Tensor, None]:
    """A dense layer with a per-layer embedding. Its tail is three launches around two GEMMs.

    hidden_states [tokens, hidden]; per_layer_input [tokens, ple]. Returns the next hidden_states.
    """
    residual = hidden_states
    x = layer.input_layernorm(hidden_states)
    x = layer.self_attn(positions=positions, hidden_states=x, forward_batch=forward_batch)
    x = layer.post_attention_layernorm(x)
    x, residual = layer.pre_feedforward_layernorm(x, residual)
    x = layer.mlp(x)
    return _ple_tail(layer, x, residual, per_layer_input), None


def ple_stream(
    layer: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    per_layer_input: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """The same from the MLP on, for releases in which the layer has a method for this part.

    hidden_states [tokens, hidden], the input of the MLP; residual [tokens, hidden], the sum of the
    parts before it. Returns the next hidden_states.
    """
    from sglang.srt.layers.layer_boundary.layout import SumGroup

    x = layer.ffn_boundary.sum_part(layer.mlp(hidden_states), forward_batch, SumGroup.TP)
    return _ple_tail(layer, x, residual, per_layer_input)


def _ple_tail(
    layer: Any, x: torch.Tensor, residual: torch.Tensor, per_layer_input: torch.Tensor
) -> torch.Tensor:
    """The rest of the layer after the MLP's output ``x``, [tokens, hidden]."""
    compiling = torch.compiler.is_compiling()
    norm_add = rmsnorm_add.rmsnorm_add_op if compiling else rmsnorm_add.rmsnorm_add
    gated = gelu_mul.gelu_mul_op if compiling else gelu_mul.gelu_mul

    norm = layer.post_feedforward_layernorm
    x = norm_add(x, norm.weight, residual, eps_of(norm))
    gate, _ = layer.per_layer_input_gate(x)
    share, _ = layer.per_layer_projection(gated(gate, per_layer_input))
    norm = layer.post_per_layer_input_norm
    out: torch.Tensor = norm_add(share, norm.weight, x, eps_of(norm), layer.layer_scalar)
    return out


def moe_forward(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> tuple[torch.Tensor, None]:
    """A layer with experts beside its MLP. One launch makes the three inputs after attention.

    hidden_states [tokens, hidden] is not changed (SGLang adds into it). Returns the next
    hidden_states.
    """
    from sglang.srt.models import gemma4_causal

    x = layer.input_layernorm(hidden_states)
    x = layer.self_attn(positions=positions, hidden_states=x, forward_batch=forward_batch)
    triple = (
        triple_rmsnorm.triple_rmsnorm_op
        if torch.compiler.is_compiling()
        else triple_rmsnorm.triple_rmsnorm
    )
    residual, dense, routed, experts = triple(
        x,
        hidden_states,
        layer.post_attention_layernorm.weight,
        layer.pre_feedforward_layernorm.weight,
        router_scale(layer.router),
        layer.pre_feedforward_layernorm_2.weight,
        eps_of(layer.post_attention_layernorm),
        eps_of(layer.pre_feedforward_layernorm),
    )
    dense = layer.mlp(dense)
    logits, _ = layer.router.proj(routed)
    experts = layer.moe(experts, logits)

    first, second = layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2
    last = layer.post_feedforward_layernorm
    if not dense.is_cuda:
        both = first(dense) + second(experts)
        return (last(both) + residual) * layer.layer_scalar, None
    out = gemma4_causal.gemma_dual_rmsnorm_residual_scalar(
        dense,
        first.weight.data,
        experts,
        second.weight.data,
        last.weight.data,
        residual,
        layer.layer_scalar,
        eps_of(first),
        eps_of(second),
        eps_of(last),
    )
    return out, None


def router_scale(router: Any) -> torch.Tensor:
    """The router's scale / sqrt(hidden), [hidden]. SGLang computes it in the first forward.

    0.5.12 keeps it beside the norm, and 0.5.13 as the norm's weight.
    """
    if hasattr(router, "_fused_scale"):
        if router._fused_scale is None:
            router.fuse_scale()
        scale: torch.Tensor = router._fused_scale
        return scale
    if not router._scale_fused:
        router.fuse_scale()
    scale = router.norm.weight
    return scale
