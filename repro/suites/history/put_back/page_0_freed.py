"""Put back: once, a page that the prefix cache evicts has no SWA page any more.

Its SWA page is given back by SGLang's own ``free_swa``, just before the eviction. So the books are
right until the eviction itself, and its error is upstream's bug alone.
"""

from __future__ import annotations

import functools
from typing import Any


def install() -> None:
    from sglang.srt.mem_cache.unified_cache.components import swa

    act = swa.SWAComponent.apply_component_action
    done: list[int] = []

    @functools.wraps(act)
    def unpaired(component: Any, action: Any) -> Any:
        if isinstance(action, swa.FreeComponentDeviceSlot) and not done:
            allocator = component.cache.token_to_kv_pool_allocator
            size = allocator.page_size
            slots = next((s for s in action.indices if len(s) >= 2 * size), None)
            if slots is not None:
                done.append(1)
                allocator.free_swa(slots[:size])
        return act(component, action)

    swa.SWAComponent.apply_component_action = unpaired
