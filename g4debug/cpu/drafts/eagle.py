"""EAGLE: one layer reads the target's hidden states beside the tokens, and writes KV of its own."""

from g4debug.cpu.toy import HIDDEN, WHOLE, Draw, drawn_draft
from g4debug.cpu.toys import llama

# Not the layer's first norm, which EAGLE leaves out.
LAYER = {
    name.removeprefix("model."): Draw(draw.shape, draw.std, draw.mean, like=name)
    for name, draw in llama.layer("model.layers.0").items()
    if ".input_layernorm." not in name
}

DRAFT = drawn_draft(
    "eagle",
    "EAGLE: a layer on the target's last hidden states, with the target's embedding and head",
    {
        **llama.CONFIG,
        "architectures": ["LlamaForCausalLMEagle"],
        "num_hidden_layers": 1,
    },
    # The token's embedding goes on as it is, and a little of the hidden state is added.
    {"fc.weight": Draw((HIDDEN, 2 * HIDDEN), 0.02, passes=WHOLE), **LAYER},
)
