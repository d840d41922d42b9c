"""Free groups: pages that SGLang frees inside of one reach the free lists at its end."""

from __future__ import annotations

from typing import Any


def in_free_group(allocator: Any) -> bool:
    """True if a free waits for the end of a free group now."""
    outside = getattr(allocator, "is_not_in_free_group", None)
    if outside is not None:
        return not outside
    return getattr(allocator, "free_group", None) is not None  # from 0.5.21 on
