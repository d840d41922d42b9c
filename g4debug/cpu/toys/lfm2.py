"""LFM2: short convolutions and full attention in turn; a request has a slot for the former."""

from g4debug.cpu.toy import DIM, HIDDEN, INNER, Draw, attention, drawn, ends, matrix, mlp, norm

LAYERS, WIDTH = 4, 3  # WIDTH: tokens that a convolution sees


def layer(prefix: str, attends: bool) -> dict[str, Draw]:
    own, conv = f"{prefix}.self_attn", f"{prefix}.conv"
    mixer = (
        {
            **attention(own, out="out_proj"),
            f"{own}.q_layernorm.weight": norm(DIM, 1.5),
            f"{own}.k_layernorm.weight": norm(DIM, 1.5),
        }
        if attends
        else {
            f"{conv}.in_proj.weight": matrix(3 * HIDDEN, HIDDEN),
            f"{conv}.conv.weight": Draw((HIDDEN, 1, WIDTH), 0.6),
            f"{conv}.out_proj.weight": matrix(HIDDEN, HIDDEN),
        }
    )
    return {
        **mixer,
        **mlp(f"{prefix}.feed_forward", ("w1", "w3", "w2")),
        f"{prefix}.operator_norm.weight": norm(),
        f"{prefix}.ffn_norm.weight": norm(),
    }


def weights() -> dict[str, Draw]:
    found = ends()
    found["model.embedding_norm.weight"] = found.pop("model.norm.weight")
    for i in range(LAYERS):
        found |= layer(f"model.layers.{i}", attends=i % 2 == 1)
    return found


TOY = drawn(
    "lfm2",
    "LFM2: hybrid linear, full attention in every other layer",
    {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": LAYERS,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "full_attn_idxs": list(range(1, LAYERS, 2)),
        "conv_L_cache": WIDTH,
        "conv_bias": False,
        "norm_eps": 1e-6,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": INNER,
        "rope_theta": 1_000_000.0,
    },
    weights(),
    pool="hybrid-linear",
    backends=("trtllm_mha", "flashinfer"),
    # On a CPU SGLang caches states only with pages of one token, which trtllm_mha does not take.
    arguments={"disable_radix_cache": True},
)
