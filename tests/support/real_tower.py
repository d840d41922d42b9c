"""A real, seeded Gemma4VisionEncoder outside of a server; see real_layer.one_process."""

from __future__ import annotations

from typing import Any

import torch


def tower(sizes: dict[str, Any], bound: float | None = None) -> Any:
    """float32 on the CPU, weights of sensible size. sizes: of Gemma4VisionConfig.

    bound: the linears clip, at a size between it and 1 more; None: they do not.
    """
    from sglang.srt.models.gemma4_vision import Gemma4VisionEncoder
    from transformers import Gemma4VisionConfig

    made = Gemma4VisionEncoder(Gemma4VisionConfig(**sizes)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(1 + 0.1 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)
    if bound is not None:
        for name, buffer in made.named_buffers():
            if name.endswith(("_min", "_max")):
                size = bound + torch.rand((), generator=generator)
                buffer.fill_(-size if name.endswith("_min") else size)
    return made


def logits_of_size(made: Any, size: float) -> None:
    """Scale attention's logits. A trained tower's are of size 1; norms of weight 1 make
    sqrt(head_dim) of it, where softmax turns every rounding into another answer."""
    for layer in made.encoder.layers:
        attention = layer.self_attn
        attention.q_norm.weight.mul_(size / attention.head_dim**0.5)


def positions(width: int, height: int, padded: int = 0) -> torch.Tensor:
    """Of a picture's patches: int64 [width * height + padded, 2], x and y, -1 for padding."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    at = torch.full((width * height + padded, 2), -1)
    at[: width * height] = torch.stack([x.reshape(-1), y.reshape(-1)], dim=-1)
    return at
