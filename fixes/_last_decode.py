"""Makes room where SGLang is about to end the last decoding request, as a step has no pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def spares(make_room: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    """A hook around ``ScheduleBatch.check_decode_mem``: whether the next decode step has its pages.

    SGLang retracts the others first. If it finds no pages for the last one, it ends it. Before
    that ``make_room(batch, request)`` is asked, and SGLang looks again if it returns True.
    """

    def around_check(
        call_next: Callable[..., bool],
        batch: Any,
        selected_indices: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> bool:
        """selected_indices: the requests that are left of the batch; None for all of them."""
        there = call_next(batch, selected_indices, **kwargs)
        left = range(len(batch.reqs)) if selected_indices is None else selected_indices
        if there or len(left) != 1 or not make_room(batch, batch.reqs[left[0]]):
            return there
        return call_next(batch, selected_indices, **kwargs)

    return around_check
