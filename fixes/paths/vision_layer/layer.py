"""Gemma-4's vision encoder, with our kernels for the pointwise operations of its layers.

It computes what Gemma-4 computes, in the same order. Source: ``Gemma4VisionTransformer`` of SGLang,
and Hugging Face's. The norm and the clamp before a layer's first GEMM run in the last launch of the
layer before. That is why the whole encoder is replaced and not a single layer.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.fixes.paths.base import eps_of
from g4debug.fixes.paths.kernels import clipped_gelu_mul, clipped_norm_add, vision_qkv
from g4debug.fixes.paths.kernels.clipped_norm_add import Next


def encode(
    encoder: Any, inputs_embeds: torch.Tensor, patch_positions: torch.Tensor
) -> torch.Tensor:
    """The hidden states after the last layer, [batch, patches, hidden].

    inputs_embeds [batch, patches, hidden]; patch_positions int64 [batch, patches, 2]. Padding
    patches take part in attention like others, as with the two backends in SGLang, which read no
    mask.
    """
    cos, sin = (t.flatten(0, 1) for t in encoder.rotary_emb(inputs_embeds, patch_positions))
    batch, patches, _ = inputs_embeds.shape
    hidden = inputs_embeds.flatten(0, 1)
    layers = list(encoder.layers)
    qkv = layers[0].self_attn.qkv
    x: Any = torch.clamp(layers[0].input_layernorm(hidden), qkv.input_min, qkv.input_max)
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        x = attend(layer.self_attn, x, cos, sin, batch, patches)
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        hidden, x = clipped_norm_add.clipped_norm_add(
            x, output_bounds(layer.self_attn.o_proj), norm.weight, hidden, eps_of(norm),
            following=before(layer.pre_feedforward_layernorm, mlp.gate_up),
        )  # fmt: skip
        gate_up = mlp.gate_up
        x, _ = gate_up.gate_up_proj(x)
        x = clipped_gelu_mul.clipped_gelu_mul(
            x,
            (gate_up.gate_output_min, gate_up.gate_output_max),
            (gate_up.up_output_min, gate_up.up_output_max),
            (mlp.down_proj.input_min, mlp.down_proj.input_max),
        )
        x, _ = mlp.down_proj.linear(x)
        norm = layer.post_feedforward_layernorm
        hidden, x = clipped_norm_add.clipped_norm_add(
            x, output_bounds(mlp.down_proj), norm.weight, hidden, eps_of(norm),
            layer.layer_scalar,
            None if after is None else before(after.input_layernorm, after.self_attn.qkv),
        )  # fmt: skip
    return hidden.view(inputs_embeds.shape)


def attend(
    attention: Any,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    batch: int,
    patches: int,
) -> torch.Tensor:
    """Attention's output before the clamp, [batch * patches, hidden].

    x: the input of the QKV GEMM. cos, sin: [batch * patches, head_dim].
    """
    qkv = attention.qkv
    x, _ = qkv.qkv_proj(x)
    heads = vision_qkv.vision_qkv(
        x,
        attention.num_heads_per_partition,
        attention.num_kv_heads_per_partition,
        cos,
        sin,
        attention.q_norm.weight,
        attention.k_norm.weight,
        eps_of(attention.q_norm),
        (qkv.q_output_min, qkv.q_output_max),
        (qkv.k_output_min, qkv.k_output_max),
        (qkv.v_output_min, qkv.v_output_max),
    )
    del x
    found = attention.qkv_backend.forward(
        q=heads.q,
        k=heads.k,
        v=heads.v,
        cu_seqlens=None,
        bsz=batch,
        seq_len=patches,
        attention_mask=None,
        softmax_scale=1.0,
    )
    o_proj = attention.o_proj
    clipped = torch.clamp(found.flatten(1), o_proj.input_min, o_proj.input_max)
    out: torch.Tensor = o_proj.linear(clipped)[0]
    return out


def before(norm: Any, linear: Any) -> Next:
    """The norm and the clamp before the GEMM of a clippable linear."""
    return Next(norm.weight, eps_of(norm), (linear.input_min, linear.input_max))


def output_bounds(linear: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds of the output of a ClippableRowParallelLinear."""
    return linear.output_min, linear.output_max


def position_embeddings(
    table: torch.Tensor, patch_positions: torch.Tensor, padding: torch.Tensor
) -> torch.Tensor:
    """The table's entry for a patch's x plus the entry for its y; 0 for padding.

    Returns [batch, patches, hidden]. table [2, positions, hidden]; patch_positions int64 [batch,
    patches, 2], where a negative number counts as 0; padding bool [batch, patches]. The result
    equals SGLang's product of a one-hot matrix and the table bit for bit. A position beyond the
    table raises IndexError on a CPU, and is a device assertion on CUDA.
    """
    x, y = patch_positions.clamp(min=0).unbind(-1)
    embedding = torch.nn.functional.embedding
    return (embedding(x, table[0]) + embedding(y, table[1])).masked_fill(padding[..., None], 0.0)
