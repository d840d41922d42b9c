"""The norms between attention and a mixture of experts in one launch (performance path).

26B-A4B's layers norm the output of attention, add it to the residual, and norm the sum three times:
for the dense MLP, for the router (times a scale), for the experts. Five kernels in 0.5.12.post1,
here one (:mod:`g4debug.fixes.paths.kernels.triple_rmsnorm`).

Two differences, both on purpose: the MLP's norm sees the residual as it is stored, rounded, as the
two others do (SGLang's fused add norms the unrounded sum), and the layer's input is left alone
(SGLang adds into it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix
from g4debug.fixes.source import source

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

ID = "triple-rmsnorm"
LAYER = "sglang.srt.models.gemma4_causal.Gemma4DecoderLayer"
SHARED = ("pre_feedforward_layernorm", "pre_feedforward_layernorm_2")
NORMS = ("post_attention_layernorm", *SHARED)


def after_init(result: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Gemma4DecoderLayer.__init__``: decide for this layer."""
    from g4debug.fixes.paths import _gemma4_layer, base

    layer.g4debug_triple_rmsnorm = None
    if not layer.enable_moe_block:
        base.say(ID, f"layer {layer.layer_id}", "this model has no experts", alone=True)
        return
    why_not = base.server_limit(ID) or limit(layer)
    if not why_not:
        layer.g4debug_triple_rmsnorm = _gemma4_layer.moe_forward
    base.say(ID, f"layer {layer.layer_id}", why_not)


def limit(layer: Any) -> str:
    """Why a layer with experts goes SGLang's way; '' if it need not."""
    from g4debug.fixes.paths import base

    if layer.has_ple:
        return "got a layer with experts and a per-layer embedding, expected no embedding"
    if layer.router.norm.with_scale:
        return f"the router's norm is {layer.router.norm!r}, expected one without a weight"
    eps = {base.eps_of(getattr(layer, name)) for name in SHARED}
    eps.add(base.eps_of(layer.router.norm))
    if len(eps) > 1:
        return f"got norms with epsilons {sorted(eps)}, expected one for all three"
    why: str = base.norms_limit(layer, *NORMS) or base.norms_limit(layer.router, "norm")
    return why


def around_forward(
    call_next: Callable[..., Any],
    layer: Any,
    positions: Any,
    hidden_states: Any,
    per_layer_input: Any,
    forward_batch: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``Gemma4DecoderLayer.forward``; dynamo traces through it."""
    ours = getattr(layer, "g4debug_triple_rmsnorm", None)
    if ours is None or hidden_states.dim() != 2:
        return call_next(layer, positions, hidden_states, per_layer_input, forward_batch, **kwargs)
    return ours(layer, positions, hidden_states, forward_batch)


def still_broken() -> bool:
    """True if the layer calls the router and the experts' norm one after the other."""
    text = source(f"{LAYER}.forward")
    return "self.router(" in text and "self.pre_feedforward_layernorm_2(" in text


def apply(hooks: Hooks) -> None:
    from g4debug.hooking.hooks import Order

    hooks.after("gemma4.layer_init", Order.FIX, ID, after_init)
    hooks.around("gemma4.layer", Order.FIX, ID, around_forward)


FIX = Fix(
    id=ID,
    title="the norms between attention and a mixture of experts in one launch",
    seed="PR #18",
    upstream="none",
    needs=">=0.5.12,<0.5.14",
    still_broken=still_broken,
    apply=apply,
    eligible=(
        "in MoE layers without a per-layer embedding on CUDA; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
