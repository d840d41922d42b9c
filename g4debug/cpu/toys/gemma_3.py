"""Gemma-3: two sliding layers for each full one; on SGLang 0.5.23 both kinds share one KV pool."""

from g4debug.cpu.toy import DIM, WINDOW, Draw, attention, drawn, ends, mlp, norm

LAYERS = 6


def layer(prefix: str) -> dict[str, Draw]:
    """A norm of Gemma-3 multiplies by 1 + weight.

    What a layer adds is large beside the embedding: the head is the embedding's own table, and
    would answer each token with itself.
    """
    return {
        **attention(f"{prefix}.self_attn"),
        f"{prefix}.self_attn.q_norm.weight": norm(DIM, 0.5),
        f"{prefix}.self_attn.k_norm.weight": norm(DIM, 0.5),
        **mlp(f"{prefix}.mlp"),
        f"{prefix}.input_layernorm.weight": norm(mean=0.0),
        f"{prefix}.pre_feedforward_layernorm.weight": norm(mean=0.0),
        f"{prefix}.post_attention_layernorm.weight": norm(mean=39.0),
        f"{prefix}.post_feedforward_layernorm.weight": norm(mean=39.0),
    }


TOY = drawn(
    "gemma-3",
    "Gemma-3: sliding and full layers in one pool",
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": LAYERS,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3),
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": DIM,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    ends(tied=True, mean=0.0)
    | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    backends=("trtllm_mha", "triton", "flashinfer"),
)
