"""DeepSeek-V2: multi-head latent attention, whose cache holds one compressed vector of a token."""

from g4debug.cpu.toy import HEADS, HIDDEN, MAX_POSITION, Draw, drawn, ends, matrix, mlp, norm

LAYERS = 3
NOPE, ROPE, VALUE = 32, 16, 32  # of a head: the part of Q and K without rotation, with it, and V
LATENT = 64  # kv_lora_rank


def layer(prefix: str) -> dict[str, Draw]:
    own = f"{prefix}.self_attn"
    return {
        f"{own}.q_proj.weight": matrix(HEADS * (NOPE + ROPE), HIDDEN, 2.0),
        f"{own}.kv_a_proj_with_mqa.weight": matrix(LATENT + ROPE, HIDDEN, 2.0),
        f"{own}.kv_a_layernorm.weight": norm(LATENT),
        f"{own}.kv_b_proj.weight": matrix(HEADS * (NOPE + VALUE), LATENT),
        f"{own}.o_proj.weight": matrix(HIDDEN, HEADS * VALUE),
        **mlp(f"{prefix}.mlp"),
        f"{prefix}.input_layernorm.weight": norm(),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


TOY = drawn(
    "deepseek",
    "DeepSeek-V2: MLA, an MLP in every layer",
    {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "head_dim": ROPE,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "first_k_dense_replace": LAYERS,  # no layer has experts
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "attention_bias": False,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": MAX_POSITION // 4,
        },
    },
    ends() | {n: d for i in range(LAYERS) for n, d in layer(f"model.layers.{i}").items()},
    pool="mla",
    backends=("triton", "fa3", "flashinfer", "flashmla", "trtllm_mla"),
    arguments={"attention_backend": "triton"},
)
