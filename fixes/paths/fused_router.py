"""Gemma-4's choice of experts in one launch instead of seven (performance path).

``Gemma4MoE.routing_function`` takes the top k logits and their softmax, looks up a scale for each
expert, multiplies, and casts. These are seven small kernels in each MoE layer. Here they are one,
:mod:`g4debug.fixes.paths.kernels.fused_router`. The ids are the same (its docstring has the order
of equal logits). Weights are float32 throughout, where SGLang rounds twice to the logits' dtype.

The routing function is a closure that ``Gemma4MoE.__init__`` makes and passes to ``TopK``. It is
replaced there after the constructor. SGLang's own is kept for what the kernel does not take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix, after
from g4debug.fixes.paths import base
from g4debug.fixes.source import source

if TYPE_CHECKING:
    import torch

ID = "fused-router"
MOE = "sglang.srt.models.gemma4_causal.Gemma4MoE"


def after_init(result: None, moe: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after ``Gemma4MoE.__init__``."""
    why_not = base.server_limit(ID)
    config = moe.topk.topk_config
    if not why_not:
        config.custom_routing_function = routing(
            config.custom_routing_function, moe.per_expert_scale
        )
    base.say(ID, f"layer {moe.layer_id}", why_not)


def routing(sglangs: Any, scale: torch.Tensor) -> Any:
    """A routing function as ``TopK`` calls it. scale: [experts], a parameter."""
    import torch

    from g4debug.fixes.paths.kernels.fused_router import fused_router, fused_router_op, ineligible

    def route(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """gating_output: [tokens, experts]. Returns float32 and int32 [tokens, topk]."""
        if ineligible(gating_output, scale, topk):
            chosen: tuple[torch.Tensor, torch.Tensor] = sglangs(
                hidden_states, gating_output, topk, renormalize
            )
            return chosen
        run = fused_router_op if torch.compiler.is_compiling() else fused_router
        chosen = run(gating_output, scale, topk)
        return chosen

    return route


def still_broken() -> bool:
    """True if the routing function uses ``torch.topk`` and has no fused kernel."""
    text = source(f"{MOE}.__init__")
    return "torch.topk(" in text and "fused_routing(" not in text


FIX = Fix(
    id=ID,
    title="Gemma-4's choice of experts in one launch",
    seed="PR #1",
    upstream="in 0.5.13 (a kernel of its own, which sorts)",
    needs=">=0.5.12,<0.5.16",
    elsewhere={">=0.5.13": "SGLang has a kernel of its own for it"},
    still_broken=still_broken,
    hooks=(after("gemma4.moe_init", after_init),),
    purpose="performance",
    eligible=(
        "in MoE layers on CUDA, for up to 1024 experts; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
