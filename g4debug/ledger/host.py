"""Page and token indices on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Pages = np.ndarray[Any, np.dtype[np.int64]]  # page indices, 1-D
_FIRST = np.ones(1, dtype=np.bool_)


def on_host(indices: torch.Tensor) -> Pages:
    """The values of an index tensor. Waits for its device."""
    found: Pages = indices.detach().cpu().to(torch.int64).numpy()
    return found


def distinct(values: Pages) -> Pages:
    """``values``, sorted, each once. What np.unique gives, in a fraction of its time.

    Most events are of a few pages, and a prefill that evicts makes dozens of them.
    """
    if len(values) < 2:
        return values
    found = np.sort(values)
    new = found[1:] != found[:-1]
    return found if new.all() else found[np.concatenate((_FIRST, new))]
