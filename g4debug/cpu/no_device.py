"""No device to wait for: `torch.cuda.synchronize` raises where torch was built without CUDA.

SGLang calls it on every device when a draft of MiMo-V2, on 0.5.15 also one of Llama, has got the
target's embedding and head. There its module gets `TORCH`, whose `cuda.synchronize` returns at
once.
"""

from __future__ import annotations

from typing import Any

import torch

from g4debug.cpu.module_but import ModuleBut


class _Cuda(ModuleBut):
    """The module torch.cuda, except that there is nothing to wait for."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        return None


class _Torch(ModuleBut):
    """The module torch with another `cuda`."""

    cuda = _Cuda(torch.cuda)


TORCH = _Torch(torch)
