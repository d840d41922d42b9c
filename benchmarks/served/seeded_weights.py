"""A plugin for SGLang: ``load_format=dummy`` with weights that make a model's outputs vary.

SGLang's own dummy weights are below 1e-3, so that all tokens are the same and have the same
experts. Here the entries of a matrix have the standard deviation 1 / sqrt(inputs), norms and scales
are 1, and all are drawn from one seed. So outputs vary, and so do the experts.
"""

from __future__ import annotations

from typing import Any


def seeded(model: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces ``initialize_dummy_weights``."""
    import torch

    for number, tensor in enumerate(model.state_dict().values()):
        if not torch.is_floating_point(tensor):
            continue
        if tensor.dim() < 2:
            tensor.fill_(1)
            continue
        generator = torch.Generator(device=tensor.device).manual_seed(number)
        # One expert at a time, because a float32 copy of all would not fit into memory.
        for part in tensor if tensor.dim() > 2 else (tensor,):
            part.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", seeded, HookType.REPLACE
    )
