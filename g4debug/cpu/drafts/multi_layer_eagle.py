"""Multi-layer EAGLE: a draft layer for each step, each with weights and a KV pool of its own.

All of them read the target's hidden states, and their KV is in the pages of its SWA pool. SGLang
runs it as EAGLE, if the target is of a class whose checkpoints have such layers.
"""

from dataclasses import replace

from g4debug.cpu.toy import CHAIN, HIDDEN, WHOLE, Draw, drawn_draft, norm
from g4debug.cpu.toys import mimo_v2

STEPS: int = CHAIN["speculative_num_steps"]
# The layer of the target whose numbers each draft layer has. It is a sliding one, as they are.
LIKE = "model.layers.0"


def layer(step: int) -> dict[str, Draw]:
    prefix = f"model.mtp.layers.{step}"
    block = {
        name.replace(LIKE, prefix).replace("post_attention", "pre_mlp"): replace(draw, like=name)
        for name, draw in mimo_v2.layer(LIKE, full=False).items()
    }
    return {
        # The token's embedding goes on as it is, and a little of the hidden state is added.
        f"{prefix}.eh_proj.weight": Draw((HIDDEN, 2 * HIDDEN), 0.02, passes=WHOLE),
        f"{prefix}.enorm.weight": norm(),
        f"{prefix}.hnorm.weight": norm(),
        f"{prefix}.final_layernorm.weight": replace(norm(), like="model.norm.weight"),
        **block,
    }


DRAFT = drawn_draft(
    "multi-layer-eagle",
    "multi-layer EAGLE: a layer for each step, on the target's last hidden states",
    mimo_v2.CONFIG,
    {name: draw for step in range(STEPS) for name, draw in layer(step).items()},
    targets=("mimo-v2",),
    runs_as="eagle",
)
