"""EAGLE3: as EAGLE, on the hidden states of three of the target's layers, with its own head."""

from g4debug.cpu.toy import DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, drawn_draft, matrix, mlp, norm
from g4debug.cpu.toys import llama

LAYER = "midlayer"

DRAFT = drawn_draft(
    "eagle3",
    "EAGLE3: a layer on the hidden states of three layers, with a head of its own",
    {
        **llama.CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
    },
    {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * HIDDEN),
        f"{LAYER}.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        f"{LAYER}.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, 2 * HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        **mlp(f"{LAYER}.mlp"),
        f"{LAYER}.hidden_norm.weight": norm(),
        f"{LAYER}.input_layernorm.weight": norm(),
        f"{LAYER}.post_attention_layernorm.weight": norm(),
    },
)
