"""EAGLE3: as EAGLE, on the hidden states of three of the target's layers, with its own head."""

from dataclasses import replace

from g4debug.cpu.toy import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    WHOLE,
    Draw,
    drawn_draft,
    matrix,
    mlp,
    norm,
)
from g4debug.cpu.toys import llama

LAYER, LIKE = "midlayer", "model.layers.0"
HALF, GAIN = HIDDEN // 2, 2.0
# The embedding of the token comes first in what Q, K and V are made of. A head with half of it as
# its Q and K attends to its own token, whose V is that half again, and so the layer passes it on.
HEAD = 2 * DIM  # where the first head of the second KV head begins
Q = ((0, 0, HALF, GAIN), (HEAD, HALF, HALF, GAIN))
K = ((0, 0, HIDDEN, GAIN),)
OUT = ((0, 0, HALF, 1.0), (HALF, HEAD, HALF, 1.0))
SMALL = 0.02


def like(name: str, draw: Draw) -> Draw:
    """The numbers that Llama's toy has there."""
    return replace(draw, like=name)


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
        "fc.weight": Draw((HIDDEN, 3 * HIDDEN), SMALL),
        "norm.weight": like("model.norm.weight", norm()),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": Draw((HEADS * DIM, 2 * HIDDEN), SMALL, passes=Q),
        f"{LAYER}.self_attn.k_proj.weight": Draw((KV_HEADS * DIM, 2 * HIDDEN), SMALL, passes=K),
        f"{LAYER}.self_attn.v_proj.weight": Draw((KV_HEADS * DIM, 2 * HIDDEN), SMALL, passes=WHOLE),
        f"{LAYER}.self_attn.o_proj.weight": Draw((HIDDEN, HEADS * DIM), SMALL, passes=OUT),
        **{
            name.replace(LIKE, LAYER): like(name, draw) for name, draw in mlp(f"{LIKE}.mlp").items()
        },
        f"{LAYER}.hidden_norm.weight": norm(),
        f"{LAYER}.input_layernorm.weight": norm(),
        f"{LAYER}.post_attention_layernorm.weight": norm(),
    },
    targets=("llama", "gpt-oss"),
)
