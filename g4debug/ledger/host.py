"""Page and token indices on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Pages = np.ndarray[Any, np.dtype[np.int64]]  # page indices, 1-D


def on_host(indices: torch.Tensor) -> Pages:
    """The values of an index tensor. Waits for its device."""
    found: Pages = indices.detach().cpu().to(torch.int64).numpy()
    return found
