"""Qwen3: as Llama, with a norm on each head's Q and K."""

from g4debug.cpu.toy import DIM, Draw, attention, drawn, ends, mlp, norm

LAYERS = 4


def layer(prefix: str) -> dict[str, Draw]:
    return {
        **attention(f"{prefix}.self_attn"),
        f"{prefix}.self_attn.q_norm.weight": norm(DIM, 1.5),
        f"{prefix}.self_attn.k_norm.weight": norm(DIM, 1.5),
        **mlp(f"{prefix}.mlp"),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


TOY = drawn(
    "qwen3",
    "Qwen3: full attention in every layer, Q and K normed",
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
    },
    ends() | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    backends=("trtllm_mha", "triton", "torch_native", "fa3", "flashinfer"),
)
