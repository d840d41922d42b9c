"""gpt-oss: sliding and full layers in turn, attention sinks, and experts in place of an MLP."""

from g4debug.cpu.toy import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MAX_POSITION,
    WINDOW,
    Draw,
    attention,
    drawn,
    ends,
    matrix,
    norm,
)

LAYERS, EXPERTS = 4, 4
INNER = HIDDEN  # of an expert


def layer(prefix: str) -> dict[str, Draw]:
    own, experts = f"{prefix}.self_attn", f"{prefix}.mlp.experts"
    widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
    return {
        **attention(own),
        **{f"{own}.{name}_proj.bias": Draw((width,), 0.02) for name, width in widths.items()},
        # SGLang keeps them in bfloat16 for triton.
        f"{own}.sinks": Draw((HEADS,), 2.0, rounded=True),
        f"{prefix}.mlp.router.weight": matrix(EXPERTS, HIDDEN),
        f"{prefix}.mlp.router.bias": Draw((EXPERTS,), 0.1),
        # Of each expert [inputs, outputs]; gate and up are every other column.
        f"{experts}.gate_up_proj": Draw((EXPERTS, HIDDEN, 2 * INNER), HIDDEN**-0.5),
        f"{experts}.gate_up_proj_bias": Draw((EXPERTS, 2 * INNER), 0.02),
        f"{experts}.down_proj": Draw((EXPERTS, INNER, HIDDEN), INNER**-0.5),
        f"{experts}.down_proj_bias": Draw((EXPERTS, HIDDEN), 0.02),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


TOY = drawn(
    "gpt-oss",
    "gpt-oss: hybrid SWA pool, attention sinks, experts",
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "sliding_window": WINDOW,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITION,
        },
        "max_position_embeddings": 32 * MAX_POSITION,
    },
    ends() | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    pool="swa",
    backends=("trtllm_mha", "triton", "fa3"),
)
