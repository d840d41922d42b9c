"""The layers of the vision tower in four launches around their GEMMs (performance path).

On a H200 E2B's tower takes 48.9 ms for six pictures together, of which GEMMs and attention are 11
ms. The rest are eleven clamps, seven norms and 2-D RoPE, for which 0.5.12 runs some 60 kernels in
each layer. With this path the tower takes 17.6 ms. There is one launch from the QKV GEMM to
attention (``kernels/vision_qkv.py``), one for gelu and its three clamps
(``kernels/clipped_gelu_mul.py``), and one after each half of the layer for clamp, norm, residual,
scalar and the input of the next GEMM (``kernels/clipped_norm_add.py``). Each computes in float32
and rounds once, where SGLang rounds after every operation. The position of a patch is looked up in
the table, where SGLang multiplies the table with a one-hot matrix of 2.5 GB.

The GEMMs and attention stay SGLang's modules. The mask of patches x patches is not made, because
none of the attention backends that this path runs with reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from g4debug.fixes.base import Fix, after, around
from g4debug.fixes.paths import base
from g4debug.fixes.source import source

ID = "vision-layer"
VISION = "sglang.srt.models.gemma4_vision"
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
HEAD_NORMS = ("q_norm", "k_norm", "v_norm")
NO_MASK = ("VisionFlash3Attention", "VisionTritonAttention")  # they do not use a mask


def after_init(result: None, tower: Any, *args: Any, **kwargs: Any) -> None:
    """Runs after ``Gemma4VisionEncoder.__init__`` and decides for this tower."""
    why_not = base.server_limit(ID) or limit(tower)
    use(tower, not why_not)
    base.say(ID, "the vision tower", why_not)


def use(tower: Any, ours: bool) -> None:
    """Let a Gemma4VisionEncoder run our code from now on, or SGLang's."""
    tower.encoder.g4debug_vision_layer = ours
    tower.patch_embedder.g4debug_vision_layer = ours


def used(tower: Any) -> bool:
    """True if a Gemma4VisionEncoder runs our code."""
    return getattr(tower.encoder, "g4debug_vision_layer", False)


def limit(tower: Any) -> str:
    """Why a tower runs SGLang's own code; '' if it runs ours."""
    for number, layer in enumerate(tower.encoder.layers):
        attention = layer.self_attn
        backend = type(attention.qkv_backend).__name__
        if backend not in NO_MASK:
            return f"{backend} may read a mask, expected {' or '.join(NO_MASK)}"
        why = base.norms_limit(layer, *NORMS) or base.norms_limit(attention, *HEAD_NORMS)
        if why:
            return f"layer {number}: {why}"
        eps = {base.eps_of(getattr(attention, name)) for name in HEAD_NORMS}
        if attention.v_norm.with_scale or len(eps) > 1:
            return f"layer {number}: got {attention.v_norm!r}, expected q's epsilon and no weight"
        if attention.head_dim % 4:
            return f"layer {number}: got head_dim {attention.head_dim}, expected a multiple of 4"
    return ""


def around_encoder(
    call_next: Callable[..., Any],
    encoder: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    patch_positions: Any,
) -> Any:
    """Wraps ``Gemma4VisionTransformer.forward``."""
    if not getattr(encoder, "g4debug_vision_layer", False):
        return call_next(encoder, inputs_embeds, attention_mask, patch_positions)
    from g4debug.fixes.paths.vision_layer import layer as vision_layers

    return vision_layers.encode(encoder, inputs_embeds, patch_positions)


def around_positions(
    call_next: Callable[..., Any], embedder: Any, patch_positions: Any, padding_positions: Any
) -> Any:
    """Wraps ``Gemma4VisionPatchEmbedder._position_embeddings``."""
    if not getattr(embedder, "g4debug_vision_layer", False):
        return call_next(embedder, patch_positions, padding_positions)
    from g4debug.fixes.paths.vision_layer import layer as vision_layers

    table = embedder.position_embedding_table
    return vision_layers.position_embeddings(table, patch_positions, padding_positions)


def still_broken() -> bool:
    """True if the tower clamps, norms and rotates in torch, and finds positions by a one-hot."""
    rope = source(f"{VISION}.Gemma4VisionAttention.forward")
    mlp = source(f"{VISION}.Gemma4VisionMLP.forward")
    positions = source(f"{VISION}.Gemma4VisionPatchEmbedder._position_embeddings")
    clamps = source("sglang.srt.layers.clippable_linear.ClippableQKVParallelLinear.forward")
    return (
        "_apply_multidimensional_rope(q" in rope
        and 'gelu(gate, approximate="tanh")' in mlp
        and "one_hot(" in positions
        and "torch.clamp(q" in clamps
    )


FIX = Fix(
    id=ID,
    title="the vision tower's layers in four launches around their GEMMs and attention",
    seed="none; the measurements of mm-batched-encoder showed the need",
    upstream="none",
    needs=">=0.5.12,<0.5.16 or ==0.5.23",
    still_broken=still_broken,
    hooks=(
        after("vision.tower_init", after_init),
        around("vision.encoder", around_encoder),
        around("vision.positions", around_positions),
    ),
    purpose="performance",
    eligible=(
        "in Gemma-4's vision tower on CUDA, if its attention is fa3 or triton_attn; not under "
        "--enable-deterministic-inference, --rl-on-policy-target or --enable-torch-compile"
    ),
)
