"""The norms between attention and a mixture of experts in one launch (performance path).

The layers of 26B-A4B norm the output of attention and add it to the residual. Then they norm the
sum three times: for the dense MLP, for the router (times a scale) and for the experts. These are
five kernels in 0.5.12.post1, and one here (:mod:`g4debug.fixes.paths.kernels.triple_rmsnorm`).

Two things are different on purpose. The MLP's norm gets the rounded residual, as the other two
norms do; SGLang's fused add norms the sum before it is rounded. And the layer's input is not
changed; SGLang adds into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, after, around
from g4debug.fixes.paths import base
from g4debug.fixes.source import source

ID = "triple-rmsnorm"
LAYER = "sglang.srt.models.gemma4_causal.Gemma4DecoderLayer"
SHARED = ("pre_feedforward_layernorm", "pre_feedforward_layernorm_2")
NORMS = ("post_attention_layernorm", *SHARED)


def after_init(result: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after ``Gemma4DecoderLayer.__init__`` and decides for this layer."""
    from g4debug.fixes.paths import _gemma4_layer

    layer.g4debug_triple_rmsnorm = None
    if not layer.enable_moe_block:
        base.say(ID, f"layer {layer.layer_id}", "this model has no experts", alone=True)
        return
    why_not = base.server_limit(ID) or limit(layer)
    if not why_not:
        layer.g4debug_triple_rmsnorm = _gemma4_layer.moe_forward
    base.say(ID, f"layer {layer.layer_id}", why_not)


def limit(layer: Any) -> str:
    """Why a layer with experts runs SGLang's own code; '' if it runs ours."""
    if layer.has_ple:
        return "got a layer with experts and a per-layer embedding, expected no embedding"
    if layer.router.norm.with_scale:
        return f"the router's norm is {layer.router.norm!r}, expected one without a weight"
    eps = {base.eps_of(getattr(layer, name)) for name in SHARED}
    eps.add(base.eps_of(layer.router.norm))
    if len(eps) > 1:
        return f"got norms with epsilons {sorted(eps)}, expected one for all three"
    return base.norms_limit(layer, *NORMS) or base.norms_limit(layer.router, "norm")


def around_forward(
    call_next: Callable[..., Any],
    layer: Any,
    positions: Any,
    hidden_states: Any,
    per_layer_input: Any,
    forward_batch: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``Gemma4DecoderLayer.forward``. dynamo traces through it."""
    ours = getattr(layer, "g4debug_triple_rmsnorm", None)
    if ours is None or hidden_states.dim() != 2:
        return call_next(layer, positions, hidden_states, per_layer_input, forward_batch, **kwargs)
    return ours(layer, positions, hidden_states, forward_batch)


def still_broken() -> bool:
    """True if the layer calls the router and the experts' norm one after the other."""
    text = source(f"{LAYER}.forward")
    return "self.router(" in text and "self.pre_feedforward_layernorm_2(" in text


FIX = Fix(
    id=ID,
    title="the norms between attention and a mixture of experts in one launch",
    seed="PR #18",
    upstream="none",
    needs=">=0.5.12,<0.5.16",
    elsewhere={
        ">=0.5.23": "these norms belong to SGLang's stage boundaries there, which also sum "
        "over the ranks",
    },
    still_broken=still_broken,
    hooks=(
        after("gemma4.layer_init", after_init),
        around("gemma4.layer", around_forward),
    ),
    purpose="performance",
    eligible=(
        "in MoE layers without a per-layer embedding on CUDA; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
