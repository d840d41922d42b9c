"""Q and K of Llama-4 as on a GPU: rotated in place, and normed in the dtype that they have.

SGLang 0.5.23 calls the rotation for what it does to its arguments. Its kernel for GPUs writes
there; its torch code for CPUs returns new tensors and leaves the arguments as they were, so that on
a CPU no position would count. Behind it SGLang norms Q and K in bfloat16, but for CUDA, and a model
in float32 ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class InPlace:
    """A rotation that writes its results into Q and K, which may be views, and returns them."""

    def __init__(self, rotation: Callable[..., Any]) -> None:
        self.rotation = rotation

    def __call__(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = self.rotation(positions, query, key)
        return query.copy_(rotated[0]), key.copy_(rotated[1])


def rotations(own: Callable[..., Any]) -> Callable[..., InPlace]:
    """`get_rope`, whose rotations other models may share: they stay as they are."""

    def get_rope(*arguments: Any, **options: Any) -> InPlace:
        return InPlace(own(*arguments, **options))

    return get_rope


def as_on_cuda(own: object) -> bool:
    """`_is_cuda` of Llama-4: norms in the model's dtype. Beside it, only its experts ask for it."""
    return True
