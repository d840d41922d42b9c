"""STANDALONE: a smaller model of its own drafts. It is Llama's toy without its last layer."""

from g4debug.cpu.toy import drawn_draft, ends
from g4debug.cpu.toys import llama

LAYERS = llama.LAYERS - 1

DRAFT = drawn_draft(
    "standalone",
    "STANDALONE: a model of its own, which is the target without its last layer",
    {**llama.CONFIG, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS},
    ends() | {n: d for i in range(LAYERS) for n, d in llama.layer(f"model.layers.{i}").items()},
)
