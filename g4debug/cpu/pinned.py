"""`torch` without pinned memory, for modules that pin what they copy to the device.

`torch.tensor(..., pin_memory=True)` raises where there is no accelerator; everything else is
torch's own. Why: prompt logprobs build their indices so, on every device.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class _Torch(types.ModuleType):
    """Forwards to torch; only `tensor` forgets `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(data: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **options)


TORCH = _Torch("torch")
