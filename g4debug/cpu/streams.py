"""`torch.Tensor.record_stream`, which torch refuses for a tensor on the CPU.

The call tells CUDA's allocator that a stream still reads the tensor. On a CPU there is no such
allocator and one order of execution, so there is nothing to tell. SGLang 0.5.14 to 0.5.21 calls it
under overlap scheduling whatever the device is.
"""

from __future__ import annotations

from typing import Any

import torch

_REAL = torch.Tensor.record_stream


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing for a tensor on the CPU; torch's own method for any other."""
    if self.device.type != "cpu":
        _REAL(self, stream)
