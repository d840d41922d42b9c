"""Qwen3-Next: three layers of four are linear (the gated delta rule), the fourth attends.

A linear layer keeps of a sequence one matrix for each head, and the tokens that its convolution
sees. Experts, and one that all tokens share, are in place of each layer's MLP.
"""

from g4debug.cpu.toy import DIM, HEADS, HIDDEN, Draw, attention, drawn, ends, matrix, norm

LAYERS, INTERVAL, WIDTH = 8, 4, 4  # WIDTH: tokens that a convolution sees
# Of a linear layer. A key and a value differ in size, so that a matrix cannot be taken for its
# transpose.
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 32
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
EXPERTS, CHOSEN, INNER = 4, 2, 32  # INNER: of an expert


def linear(prefix: str) -> dict[str, Draw]:
    """A head forgets half of its matrix within some ten to some hundred tokens."""
    return {
        f"{prefix}.in_proj_qkvz.weight": matrix(2 * KEYS + 2 * VALUES, HIDDEN),
        f"{prefix}.in_proj_ba.weight": matrix(2 * VALUE_HEADS, HIDDEN),
        f"{prefix}.conv1d.weight": Draw((2 * KEYS + VALUES, 1, WIDTH), 0.6),
        f"{prefix}.A_log": Draw((VALUE_HEADS,), 0.7, -3.0),
        f"{prefix}.dt_bias": Draw((VALUE_HEADS,), 0.5, -1.0),
        f"{prefix}.norm.weight": norm(VALUE_DIM),
        f"{prefix}.out_proj.weight": matrix(HIDDEN, VALUES),
    }


def full(prefix: str) -> dict[str, Draw]:
    """Beside its Q, each head has a gate for what it has read."""
    return {
        **attention(prefix),
        f"{prefix}.q_proj.weight": matrix(2 * HEADS * DIM, HIDDEN, 2.0),
        f"{prefix}.q_norm.weight": norm(DIM, 0.5),
        f"{prefix}.k_norm.weight": norm(DIM, 0.5),
    }


def expert(prefix: str) -> dict[str, Draw]:
    return {
        f"{prefix}.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.up_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.down_proj.weight": matrix(HIDDEN, INNER),
    }


def layer(prefix: str, attends: bool) -> dict[str, Draw]:
    """A norm multiplies by 1 + weight, but for the one behind the delta rule."""
    own = f"{prefix}.mlp"
    found = full(f"{prefix}.self_attn") if attends else linear(f"{prefix}.linear_attn")
    for i in range(EXPERTS):
        found |= expert(f"{own}.experts.{i}")
    return {
        **found,
        **expert(f"{own}.shared_expert"),
        f"{own}.gate.weight": matrix(EXPERTS, HIDDEN),
        f"{own}.shared_expert_gate.weight": matrix(1, HIDDEN),
        f"{prefix}.input_layernorm.weight": norm(mean=0.0),
        f"{prefix}.post_attention_layernorm.weight": norm(mean=0.0),
    }


def weights() -> dict[str, Draw]:
    found = {**ends(), "model.norm.weight": norm(mean=0.0)}
    for i in range(LAYERS):
        found |= layer(f"model.layers.{i}", attends=(i + 1) % INTERVAL == 0)
    return found


TOY = drawn(
    "qwen3-next",
    "Qwen3-Next: hybrid linear (the gated delta rule), full attention in every fourth layer, "
    "experts",
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": LAYERS,
        "full_attention_interval": INTERVAL,
        "attention_bias": False,
        "linear_conv_kernel_dim": WIDTH,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "norm_topk_prob": True,
        "moe_intermediate_size": INNER,
        "shared_expert_intermediate_size": INNER,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000.0,
    },
    weights(),
    pool="hybrid-linear",
    backends=("trtllm_mha", "flashinfer"),
    # For some ten requests, and more for the prefix cache. SGLang would else take gigabytes.
    arguments={"max_mamba_cache_size": 128},
)
