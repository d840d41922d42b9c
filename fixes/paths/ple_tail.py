"""The tail of E2B's and E4B's layers in three launches around two GEMMs (performance path).

After its MLP a layer with a per-layer embedding runs norm, add, *gate GEMM*, gelu, multiply,
*projection GEMM*, norm, add, multiply: seven pointwise kernels in 0.5.12.post1, 35 or 42 times per
step. Here: norm + add, gelu x embedding, norm + add x layer scalar
(``kernels/rmsnorm_add.py``, ``kernels/gelu_mul.py``). Each is float32 inside and
rounds once, where SGLang rounds after every step.

The GEMMs stay SGLang's modules, quantised or with LoRA, and so does all before the tail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from g4debug.fixes.base import Fix
from g4debug.fixes.source import source

if TYPE_CHECKING:
    from g4debug.hooking.hooks import Hooks

ID = "ple-tail"
LAYER = "sglang.srt.models.gemma4_causal.Gemma4DecoderLayer"
NORMS = ("post_feedforward_layernorm", "post_per_layer_input_norm")


def after_init(result: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Gemma4DecoderLayer.__init__``: decide for this layer."""
    from g4debug.fixes.paths import _gemma4_layer, base

    layer.g4debug_ple_tail = None
    if not layer.has_ple:
        why_not = "this model has no per-layer embedding"
        base.say(ID, f"layer {layer.layer_id}", why_not, alone=True)
        return
    why_not = base.server_limit(ID) or limit(layer)
    if not why_not:
        layer.g4debug_ple_tail = _gemma4_layer.ple_forward
    base.say(ID, f"layer {layer.layer_id}", why_not)


def limit(layer: Any) -> str:
    """Why a layer with a per-layer embedding goes SGLang's way; '' if it need not."""
    from g4debug.fixes.paths import base

    if layer.enable_moe_block:
        return "got a layer with experts and a per-layer embedding, expected a dense one"
    why: str = base.norms_limit(layer, *NORMS)
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
    ours = getattr(layer, "g4debug_ple_tail", None)
    if ours is None or per_layer_input is None or hidden_states.dim() != 2:
        return call_next(layer, positions, hidden_states, per_layer_input, forward_batch, **kwargs)
    return ours(layer, positions, hidden_states, per_layer_input, forward_batch)


def still_broken() -> bool:
    """True if the layer runs gelu and what is around it as torch operations."""
    text = source(f"{LAYER}.forward")
    return "gelu(gate" in text and "self.post_per_layer_input_norm(" in text


def apply(hooks: Hooks) -> None:
    from g4debug.hooking.hooks import Order

    hooks.after("gemma4.layer_init", Order.FIX, ID, after_init)
    hooks.around("gemma4.layer", Order.FIX, ID, around_forward)


FIX = Fix(
    id=ID,
    title="the tail of E2B's and E4B's layers in three launches around two GEMMs",
    seed="PR #16",
    upstream="none",
    needs=">=0.5.12,<0.5.14",
    still_broken=still_broken,
    apply=apply,
    eligible=(
        "in dense layers with a per-layer embedding on CUDA; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
