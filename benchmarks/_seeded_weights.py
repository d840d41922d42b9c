"""SGLang plugin: ``load_format=dummy`` with weights that a model can run on.

SGLang's own are within 1e-3, so that every token is the same one and every token has the same
experts. Here matrices have entries of standard deviation 1 / sqrt(inputs), norms and scales are 1,
from one seed: outputs vary, and so do the experts.
"""

from __future__ import annotations

from typing import Any


def seeded(model: Any, *args: Any, **kwargs: Any) -> None:
    """In place of ``initialize_dummy_weights``."""
    import torch

    for number, tensor in enumerate(model.state_dict().values()):
        if not torch.is_floating_point(tensor):
            continue
        if tensor.dim() < 2:
            tensor.fill_(1)
            continue
        generator = torch.Generator(device=tensor.device).manual_seed(number)
        # Expert by expert: a float32 copy of all would not fit.
        for part in tensor if tensor.dim() > 2 else (tensor,):
            part.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", seeded, HookType.REPLACE
    )
