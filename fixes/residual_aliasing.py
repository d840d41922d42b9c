"""Keeps the hidden states that Gemma-4 captures for a draft as they were captured.

``Gemma4DecoderLayer.forward`` uses its input as the residual. On CUDA the fused add-and-norm adds
the attention's output to the residual *in place*, so the layer overwrites its own input. No layer
reads that tensor again. But if the model captures hidden states for a draft (EAGLE3; DFLASH from
0.5.14 on), the captured list holds the same tensor, and the draft gets "input + attention" of the
next layer instead of the input.

With the fix a captured layer works on a copy of its input. Layers that are not captured are left as
they are and cost nothing. FROZEN_KV_MTP captures none: it reads only the output of the last norm.
From a later fix of the seeds' fork.

SGLang 0.5.23 does not have the bug: the object that owns the residual there copies the hidden
states that are captured. It also refuses a layer's input that is not the very tensor that the layer
before wrote (RuntimeError "written residual does not match the supplied output"), so the fix would
stop a server there.
"""

from __future__ import annotations

from typing import Any

from g4debug.fixes.base import Fix, after
from g4debug.fixes.source import source

LAYER = "sglang.srt.models.gemma4_causal.Gemma4DecoderLayer"
SITES = (
    "model.capture_eagle3",
    "model.capture_eagle3_mm",
    "model.capture_dflash",
    "model.capture_dflash_mm",
)
_KEPT = "_g4debug_kept"


def own_input(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: the layer gets a copy of hidden_states ([tokens, hidden])."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clone()}
    positions, hidden_states, *others = args
    return (positions, hidden_states.clone(), *others), kwargs


def keep_captured(text_model: Any) -> None:
    """Let each layer in ``layers_to_capture`` work on a copy. It may be called again."""
    for handle in vars(text_model).pop(_KEPT, ()):
        handle.remove()
    layers = text_model.layers
    # The index len(layers) means the last layer's output, which nobody overwrites.
    captured = sorted({i for i in text_model.layers_to_capture if 0 <= i < len(layers)})
    vars(text_model)[_KEPT] = [
        layers[i].register_forward_pre_hook(own_input, with_kwargs=True) for i in captured
    ]


def after_capture(result: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs after ``set_eagle3_layers_to_capture`` and ``set_dflash_layers_to_capture``."""
    text_model = getattr(model, "language_model", None) or model.model
    if not hasattr(text_model, "layers_to_capture"):
        text_model = text_model.model
    keep_captured(text_model)
    return result


def still_broken() -> bool:
    """True if the layer's residual is its input and is then passed to a norm that overwrites it."""
    forward = source(f"{LAYER}.forward")
    norm = forward.partition("self.pre_feedforward_layernorm(")[2].partition(")")[0]
    return "residual = hidden_states\n" in forward and "residual" in norm


FIX = Fix(
    id="residual-aliasing",
    title="hidden states that Gemma-4 captures for a draft are not overwritten by the next layer",
    seed="none; a later fix of the seeds' fork",
    upstream="none known; 0.5.23 does not have the bug, its layers pass the residual explicitly",
    needs=">=0.5.12,<0.5.23",
    elsewhere={
        ">=0.5.23": "a layer refuses a copy of its input there, and SGLang itself copies what it "
        "captures",
    },
    still_broken=still_broken,
    hooks=tuple(after(site, after_capture, optional=True) for site in SITES),
    purpose="correctness",
)
