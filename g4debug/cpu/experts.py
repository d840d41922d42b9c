"""Experts of a toy target: their weights, and the method that would not run them on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from g4debug.cpu.geometry import MoEGeometry
    from g4debug.cpu.weights import Weights

EXPERT_SHARE = 0.3  # of the MLP's size, so that a token's experts change what is said, not rule it


def tensors(
    w: Weights, g: MoEGeometry, layer: int, prefix: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Router, experts and their norms of one layer, named as in a Gemma-4 checkpoint.

    ``experts.gate_up_proj`` is [experts, 2 * intermediate, hidden], gate first;
    ``experts.down_proj`` [experts, hidden, intermediate].
    """
    name, inner, unit = f"layer{layer}/experts", g.expert_intermediate, 1 / math.sqrt(g.hidden)

    def constant(value: float) -> torch.Tensor:
        return torch.full((g.hidden,), value, device=w.device)

    # The router sees a vector of length 1 (its norm, over sqrt(hidden)): logits of a few.
    yield f"{prefix}.router.proj.weight", w._normal(f"{name}/router", g.experts, g.hidden, std=4.0)
    yield f"{prefix}.router.scale", constant(1.0)
    yield f"{prefix}.router.per_expert_scale", torch.ones(g.experts, device=w.device)
    gate_up = w._normal(f"{name}/gate_up", g.experts, 2 * inner, g.hidden, std=unit)
    yield f"{prefix}.experts.gate_up_proj", gate_up
    down = w._normal(f"{name}/down", g.experts, g.hidden, inner, std=1 / math.sqrt(inner))
    yield f"{prefix}.experts.down_proj", down
    yield f"{prefix}.pre_feedforward_layernorm_2.weight", constant(1.0)
    yield f"{prefix}.post_feedforward_layernorm_1.weight", constant(1.0)
    yield f"{prefix}.post_feedforward_layernorm_2.weight", constant(EXPERT_SHARE)


def forward_cpu(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Stands in for ``UnquantizedFusedMoEMethod.forward_cpu``, which asserts silu.

    Gemma-4's experts are gelu. SGLang's own torch experts, which that method calls otherwise, do
    both.
    """
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    output = moe_forward_native(
        layer, dispatch_output.hidden_states, dispatch_output.topk_output, self.moe_runner_config
    )
    return StandardCombineInput(hidden_states=output)
