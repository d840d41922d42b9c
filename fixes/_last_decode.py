"""Tells when SGLang is about to end the last decoding request, because a step has no pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def last_one(batch: Any, selected_indices: Sequence[int] | None) -> Any:
    """The request that is left if it is the only one, else None.

    SGLang retracts the others first. If ``ScheduleBatch.check_decode_mem`` finds no pages for the
    last one, SGLang ends it. selected_indices: which are left of the batch; None for all of them.
    """
    left = range(len(batch.reqs)) if selected_indices is None else selected_indices
    return batch.reqs[left[0]] if len(left) == 1 else None
