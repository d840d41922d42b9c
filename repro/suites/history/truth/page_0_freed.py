"""Counts the prefix cache's evictions of SWA pages, and the times that page 0 is freed.

The upstream fix that was proposed (#38519) leaves out the pages without a SWA page, which map to 0,
in ``SWATokenToKVPoolAllocator._free_swa_pages`` (0.5.23, ``allocator/swa.py:532``).
"""

from __future__ import annotations

from typing import Any

from suites.history.counter import Counter, around


def install(counter: Counter) -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_cache.components import swa

    @around(swa.SWAComponent, "apply_component_action")
    def act(component: Any, action: Any) -> None:
        if isinstance(action, swa.FreeComponentDeviceSlot):
            counter.reached()

    @around(SWATokenToKVPoolAllocator, "_free_swa_pages")
    def free(allocator: Any, slots: Any, **kwargs: Any) -> None:
        first = allocator.full_to_swa_index_mapping[slots[:: allocator.page_size]]
        if not (first > 0).all():
            counter.triggered(f"page 0 is freed with {len(first)} pages", int((first <= 0).sum()))
