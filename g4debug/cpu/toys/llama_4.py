"""Llama-4: three layers of four see a chunk of the context (irope), the fourth all of it."""

from g4debug.cpu.toy import INNER, WINDOW, Draw, attention, drawn, ends, mlp, norm

LAYERS = 4


def layer(prefix: str) -> dict[str, Draw]:
    return {
        **attention(f"{prefix}.self_attn"),
        **mlp(f"{prefix}.feed_forward"),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


TOY = drawn(
    "llama-4",
    "Llama-4: hybrid SWA pool, attention in chunks in three of four layers",
    {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4_text",
        "num_hidden_layers": LAYERS,
        "intermediate_size_mlp": INNER,
        # A model without experts: one layer of so many would have them.
        "moe_layers": [],
        "interleave_moe_layer_step": LAYERS + 1,
        "num_local_experts": 1,
        "attention_chunk_size": WINDOW,
        "use_qk_norm": True,
        "attn_temperature_tuning": False,
        "rope_theta": 10_000.0,
    },
    ends() | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    pool="swa",
    # The only backend here that has its attention in chunks.
    backends=("fa3",),
    arguments={"attention_backend": "fa3"},
)
