"""The end of E2B's and E4B's layers in three launches around two GEMMs (performance path).

After its MLP a layer with a per-layer embedding runs norm, add, *gate GEMM*, gelu, multiply,
*projection GEMM*, norm, add, multiply. In 0.5.12.post1 these are seven pointwise kernels, 35 or 42
times per step. Here they are three: norm + add, gelu x embedding, and norm + add x layer scalar
(``kernels/rmsnorm_add.py``, ``kernels/gelu_mul.py``). Each computes in float32 and rounds once,
where SGLang rounds after every operation.

The GEMMs stay SGLang's modules, also quantised or with LoRA, and so does all that comes before.
From 0.5.23 on a layer has a method of its own for what comes after attention (``_next_stream``).
There only that method is replaced, and the MLP's sum stays SGLang's, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, Hook, after, around
from g4debug.fixes.paths import base
from g4debug.fixes.source import source
from g4debug.hooking import targets

ID = "ple-tail"
LAYER = "sglang.srt.models.gemma4_causal.Gemma4DecoderLayer"
AFTER_ATTENTION = "gemma4.next_stream"
NORMS = ("post_feedforward_layernorm", "post_per_layer_input_norm")


def after_init(result: None, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after ``Gemma4DecoderLayer.__init__`` and decides for this layer."""
    from g4debug.fixes.paths import _gemma4_layer

    layer.g4debug_ple_tail = None
    if not layer.has_ple:
        why_not = "this model has no per-layer embedding"
        base.say(ID, f"layer {layer.layer_id}", why_not, alone=True)
        return
    why_not = base.server_limit(ID) or limit(layer)
    if not why_not:
        apart = targets.layer_tail_is_apart()
        layer.g4debug_ple_tail = _gemma4_layer.ple_stream if apart else _gemma4_layer.ple_forward
    base.say(ID, f"layer {layer.layer_id}", why_not)


def limit(layer: Any) -> str:
    """Why a layer with a per-layer embedding runs SGLang's own code; '' if it runs ours."""
    if layer.enable_moe_block:
        return "got a layer with experts and a per-layer embedding, expected a dense one"
    return base.norms_limit(layer, *NORMS)


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
    ours = getattr(layer, "g4debug_ple_tail", None)
    if ours is None or per_layer_input is None or hidden_states.dim() != 2:
        return call_next(layer, positions, hidden_states, per_layer_input, forward_batch, **kwargs)
    return ours(layer, positions, hidden_states, per_layer_input, forward_batch)


def around_next_stream(
    call_next: Callable[..., Any],
    layer: Any,
    hidden_states: Any,
    residual: Any,
    per_layer_input: Any,
    forward_batch: Any,
) -> Any:
    """Wraps ``Gemma4DecoderLayer._next_stream``. dynamo traces through it."""
    ours = getattr(layer, "g4debug_ple_tail", None)
    if ours is None or per_layer_input is None or hidden_states.dim() != 2:
        return call_next(layer, hidden_states, residual, per_layer_input, forward_batch)
    return ours(layer, hidden_states, residual, per_layer_input, forward_batch)


def still_broken() -> bool:
    """True if the layer runs gelu and the norm after it as operations of their own."""
    text = source(f"{LAYER}.{'_next_stream' if targets.layer_tail_is_apart() else 'forward'}")
    return "gelu(gate" in text and "self.post_per_layer_input_norm(" in text


def hooks() -> tuple[Hook, ...]:
    apart = targets.layer_tail_is_apart()
    return (
        after("gemma4.layer_init", after_init),
        around(AFTER_ATTENTION, around_next_stream)
        if apart
        else around("gemma4.layer", around_forward),
    )


FIX = Fix(
    id=ID,
    title="the end of E2B's and E4B's layers in three launches around two GEMMs",
    seed="PR #16",
    upstream="none",
    needs=">=0.5.12,<0.5.16 or ==0.5.23",
    still_broken=still_broken,
    hooks=hooks,
    purpose="performance",
    eligible=(
        "in dense layers with a per-layer embedding on CUDA; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
