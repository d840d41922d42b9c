"""No device to wait for: `torch.cuda.synchronize` raises where torch was built without CUDA.

SGLang calls it on every device when a draft of MiMo-V2 has got the target's embedding and head.
There its module gets `TORCH`, whose `cuda.synchronize` returns at once.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class _Cuda(types.ModuleType):
    """The module torch.cuda, except that there is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        return None


class _Torch(types.ModuleType):
    """The module torch with another `cuda`."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


TORCH = _Torch("torch")
