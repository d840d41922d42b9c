"""MiMo-V2-Flash: sliding layers with attention sinks, full ones without; V is narrower than K.

It is the target of multi-layer EAGLE: SGLang runs its EAGLE with one draft layer for each step.
"""

from __future__ import annotations

from typing import Any

from g4debug.cpu.toy import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    WINDOW,
    Draw,
    drawn,
    ends,
    matrix,
    mlp,
    norm,
)

LAYERS, V_DIM = 4, 16
SLIDING_KV_HEADS = 2 * KV_HEADS
FULL = (1, 3)
EPSILON = 1e-6
# Layers of both kinds turn half of a head's numbers. Each kind has a base of its own.
BASES = {"full_attention": 5_000_000.0, "sliding_attention": 10_000.0}
ROTATION = {"rope_type": "default", "partial_rotary_factor": 0.5}
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": LAYERS,
    "v_head_dim": V_DIM,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": SLIDING_KV_HEADS,
    "swa_head_dim": DIM,
    "swa_v_head_dim": V_DIM,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "sliding_window": WINDOW,
    # SGLang reads this one, and its layers see one key more than it says.
    "sliding_window_size": WINDOW - 1,
    "layernorm_epsilon": EPSILON,
    "rms_norm_eps": EPSILON,
    # No layer has experts. SGLang reads these lists, transformers the ones below.
    "hybrid_layer_pattern": [0 if i in FULL else 1 for i in range(LAYERS)],
    "moe_layer_freq": [0] * LAYERS,
    "layer_types": ["full_attention" if i in FULL else "sliding_attention" for i in range(LAYERS)],
    "mlp_layer_types": ["dense"] * LAYERS,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    # SGLang's words again, and then those of transformers.
    "rope_theta": BASES["full_attention"],
    "swa_rope_theta": BASES["sliding_attention"],
    "partial_rotary_factor": ROTATION["partial_rotary_factor"],
    "rope_parameters": {
        "rope_type": "default",
        **{kind: {**ROTATION, "rope_theta": base} for kind, base in BASES.items()},
    },
}


def layer(prefix: str, full: bool) -> dict[str, Draw]:
    own, kv_heads = f"{prefix}.self_attn", KV_HEADS if full else SLIDING_KV_HEADS
    found = {
        f"{own}.q_proj.weight": matrix(HEADS * DIM, HIDDEN, 2.0),
        f"{own}.k_proj.weight": matrix(kv_heads * DIM, HIDDEN, 2.0),
        f"{own}.v_proj.weight": matrix(kv_heads * V_DIM, HIDDEN),
        f"{own}.o_proj.weight": matrix(HIDDEN, HEADS * V_DIM),
        **mlp(f"{prefix}.mlp"),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }
    return found if full else found | {f"{own}.attention_sink_bias": Draw((HEADS,), 2.0)}


def weights() -> dict[str, Draw]:
    found = ends()
    for i in range(LAYERS):
        found |= layer(f"model.layers.{i}", i in FULL)
    return found


TOY = drawn(
    "mimo-v2",
    "MiMo-V2-Flash: hybrid SWA pool, attention sinks in its sliding layers, V narrower than K",
    CONFIG,
    weights(),
    pool="swa",
    backends=("fa3", "triton"),
    arguments={"attention_backend": "fa3"},
)
