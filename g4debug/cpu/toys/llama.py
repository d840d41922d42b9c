"""Llama 3: every layer sees the whole context, and there is one KV pool."""

from g4debug.cpu.toy import Draw, attention, drawn, ends, mlp, norm

LAYERS = 4
CONFIG = {
    "model_type": "llama",
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}


def layer(prefix: str) -> dict[str, Draw]:
    return {
        **attention(f"{prefix}.self_attn"),
        **mlp(f"{prefix}.mlp"),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


TOY = drawn(
    "llama",
    "Llama: full attention in every layer",
    {**CONFIG, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS},
    ends() | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    backends=("trtllm_mha", "triton", "torch_native", "fa3", "flashinfer"),
)
