"""`torch` without pinned memory, for a module that pins what it copies to the device.

`torch.tensor(..., pin_memory=True)` raises where there is no accelerator, and SGLang makes the
indices of prompt logprobs in that way on every device. All else is torch's own.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class _Torch(types.ModuleType):
    """The module torch, except that `tensor` ignores `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **options)


TORCH = _Torch("torch")
