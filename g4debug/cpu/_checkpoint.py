"""The tensors of a toy target and its assistant, by their names in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from g4debug.cpu import experts
from g4debug.cpu.geometry import MoEGeometry
from g4debug.cpu.weights import Core, Weights

Tensors = Iterator[tuple[str, torch.Tensor]]


def layer_tensors(w: Weights, layer: int, prefix: str, core: Core, assistant: bool) -> Tensors:
    """One decoder layer's tensors, lifted into B, or in R^r for the assistant."""
    g = w.geometry
    inner = g.assistant_intermediate if assistant else g.intermediate
    width = g.assistant_hidden if assistant else g.hidden
    one = math.sqrt(g.hidden / width)  # 1, or sqrt(d/r) for the same vector in R^r

    def reads(matrix: torch.Tensor) -> torch.Tensor:
        return matrix if assistant else matrix @ w.basis

    def writes(matrix: torch.Tensor) -> torch.Tensor:
        return matrix if assistant else w.basis.T @ matrix

    def constant(size: int, value: float) -> torch.Tensor:
        return torch.full((size,), value, device=w.device)

    yield f"{prefix}.self_attn.q_proj.weight", reads(core.q)
    yield f"{prefix}.self_attn.k_proj.weight", reads(core.k)
    yield f"{prefix}.self_attn.v_proj.weight", reads(core.v)
    yield f"{prefix}.self_attn.o_proj.weight", writes(core.o)
    yield f"{prefix}.self_attn.q_norm.weight", core.q_norm
    yield f"{prefix}.self_attn.k_norm.weight", constant(g.dim(layer), 1.0)
    yield f"{prefix}.mlp.gate_proj.weight", reads(core.gate[:inner])
    yield f"{prefix}.mlp.up_proj.weight", reads(core.up[:inner])
    yield f"{prefix}.mlp.down_proj.weight", writes(core.down[:, :inner])
    yield f"{prefix}.input_layernorm.weight", constant(width, one)
    yield f"{prefix}.pre_feedforward_layernorm.weight", constant(width, one)
    yield (
        f"{prefix}.post_attention_layernorm.weight",
        constant(width, one * core.attention_size),
    )
    yield f"{prefix}.post_feedforward_layernorm.weight", constant(width, one * core.mlp_size)
    yield f"{prefix}.layer_scalar", constant(1, 1.0)
    if not assistant and g.ple:
        small = core.mlp_size * (0.5 if layer in g.mirrored else 1.0)
        name = f"layer{layer}"
        gate = w._normal(f"{name}/ple_gate", g.ple, g.assistant_hidden)
        back = w._normal(f"{name}/ple_back", g.assistant_hidden, g.ple)
        yield f"{prefix}.per_layer_input_gate.weight", reads(gate / math.sqrt(g.hidden))
        yield f"{prefix}.per_layer_projection.weight", writes(back / math.sqrt(g.ple))
        yield f"{prefix}.post_per_layer_input_norm.weight", constant(width, small)


def target_tensors(w: Weights) -> Tensors:
    g = w.geometry
    yield "model.embed_tokens.weight", w.embedding_core() @ w.basis
    yield "lm_head.weight", w.head_core() @ w.basis
    yield "model.norm.weight", torch.ones(g.hidden, device=w.device)
    if g.ple:
        rows = g.layers * g.ple
        table = torch.empty(g.vocab, rows, dtype=getattr(torch, g.dtype), device=w.device)
        table.normal_(0, 1 / math.sqrt(g.ple), generator=w._generator("ple"))
        yield "model.embed_tokens_per_layer.weight", table
        yield "model.per_layer_model_projection.weight", w._normal("ple_model", rows, g.hidden)
        yield "model.per_layer_projection_norm.weight", torch.ones(g.ple, device=w.device)
    for layer in range(g.layers):
        yield from layer_tensors(w, layer, f"model.layers.{layer}", w.core(layer), False)
        if isinstance(g, MoEGeometry):
            yield from experts.tensors(w, g, layer, f"model.layers.{layer}")


def assistant_tensors(w: Weights) -> Tensors:
    g = w.geometry
    head = w.head_core()
    blocks = head[w.token_ordering()].view(g.centroids, -1, g.assistant_hidden).mean(1)
    yield "model.embed_tokens.weight", head  # the assistant's lm_head is tied to its own table
    yield "masked_embedding.centroids.weight", torch.nn.functional.normalize(blocks, dim=1)
    yield "masked_embedding.token_ordering", w.token_ordering()
    yield "pre_projection.weight", torch.cat([w.basis, g.coupling * w.basis], 1)
    yield "post_projection.weight", w.basis.T
    norm = torch.full((g.assistant_hidden,), math.sqrt(g.hidden / g.assistant_hidden))
    yield "model.norm.weight", norm
    for i, layer in enumerate(g.mirrored):
        yield from layer_tensors(w, layer, f"model.layers.{i}", w.core(layer), True)
