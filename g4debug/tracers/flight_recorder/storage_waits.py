"""Which requests of the waiting queue wait for their prefix from storage (HiCache, LMCache).

SGLang passes over these when it admits requests, and over no others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def on(scheduler: Any) -> bool:
    """True if this server has a storage for prefixes."""
    return bool(
        getattr(scheduler, "enable_hicache_storage", False)
        or getattr(scheduler, "enable_lmcache", False)
    )


def waits(scheduler: Any) -> Callable[[Any], bool]:
    """Tells of a request in the queue whether it waits for its prefix from storage."""
    cache = getattr(scheduler, "tree_cache", None)
    if not on(scheduler) or not hasattr(cache, "check_prefetch_progress"):
        return lambda request: False
    running = [
        getattr(there, name)
        for there, name in (
            (cache, "ongoing_prefetch"),
            (cache, "_external_flows"),  # LMCache
            (getattr(cache, "buffer_pipeline", None), "staged_prefetches"),
        )
        if hasattr(there, name)
    ]
    if not running:
        return lambda request: True  # another cache, which may keep them elsewhere
    # Of pipeline ranks: what the first one has decided for all of them.
    decided = getattr(getattr(cache, "cache_controller", None), "pp_prefetch_decisions", {})

    def waits_(request: Any) -> bool:
        rid = getattr(request, "rid", "")
        # What SGLang notes a prefetch under: the id, and in newer releases a handle.
        keys = rid, getattr(request, "cache_request_handle", None)
        return any(key in where for where in running for key in keys) or (
            getattr(decided.get(rid), "name", "") == "TICKETED"
        )

    return waits_
