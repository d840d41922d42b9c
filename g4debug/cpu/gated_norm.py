"""The gated norm behind Qwen3-Next's delta rule: SGLang's own torch code, in its kernel's place.

Per head, ``weight * x / rms(x) * silu(g)``. The kernel is for Triton, and uses block pointers,
which Triton has removed: its interpreter raises. SGLang keeps the same in torch elsewhere.
"""

from __future__ import annotations

import torch

from g4debug.cpu.paged_attention import refuse


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    residual: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> torch.Tensor:
    """x, g and the result: ``[..., dim]``; weight: ``[dim]``.

    Raises ValueError for other shapes, and NotImplementedError for another activation, a bias and a
    residual.
    """
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_ref

    other = None if activation in ("silu", "swish") else activation
    refuse(
        "rms_norm_gated",
        {
            "activation": other,
            "bias": bias,
            "residual": residual,
            "prenorm": prenorm,
            "residual_in_fp32": residual_in_fp32,
        },
    )
    if g.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            "the CPU engine's rms_norm_gated: got x, g and weight with the shapes "
            f"{tuple(x.shape)}, {tuple(g.shape)} and {tuple(weight.shape)}, expected two equal "
            "ones, and their last dimension."
        )
    normed: torch.Tensor = rms_norm_ref(x, weight, None, z=g, eps=eps)
    return normed
