"""No pinned memory, which is for copies to a device: torch refuses it without an accelerator.

`torch.tensor(..., pin_memory=True)` raises, and SGLang makes the indices of prompt logprobs in that
way on every device: there a module gets `TORCH`, which ignores it. So does a tensor's own
`pin_memory()`, by which SGLang makes the mask of the requests whose states the prefix cache keeps.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.cpu.module_but import ModuleBut


class _Torch(ModuleBut):
    """The module torch, except that `tensor` ignores `pin_memory`."""

    @staticmethod
    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **options)


TORCH = _Torch(torch)


def pin_memory(self: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which nothing copies to a device."""
    return self
