"""Proves that the kv-allocator tracer works: it must stop a double free in a small, invented pool.

The tracer, the ledger and its hooks, the trap and the dump are the real ones. The allocator is a
stand-in with SGLang's free list. No SGLang is needed, and no server is touched.
"""

from __future__ import annotations

from pathlib import Path

import torch

from g4debug.ledger.hooks import LedgerHooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import PAGE_SIZE, PAGES, allocator, found, free, sound, take
from g4debug.tracers.kv_allocator.tracer import KvAllocatorTracer


def fire(folder: Path, device: torch.device) -> str:
    """Free pages twice, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = KvAllocatorTracer(
        Context.alone("kv-allocator", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    ledger, hooks = tracer.ledger, LedgerHooks(tracer.ledger)
    ledger.listen(tracer.listen)
    pool = allocator(device)
    hooks.attach(pool)
    with sound("a sound allocator"):
        for pages in (3, 2):
            tokens = take(pool, pages)
            hooks.allocs.after_alloc(tokens, pool, pages * PAGE_SIZE)
            free(hooks, pool, tokens)
    if ledger.broken:
        raise CanaryError(f"the page ledger gave up: {ledger.broken}")
    record = found(lambda: free(hooks, pool, tokens), "a double free")
    page = int(tokens[0]) // PAGE_SIZE
    kinds = [event.kind for event in record.events if event.pages[0] == page]
    if record.finding.kind != "double-free" or kinds[-3:] != ["alloc", "free", "free"]:
        headline = record.finding.headline
        raise CanaryError(f"it was found, but the report is wrong: {headline}, {kinds}")
    if len(pool.free_pages) != PAGES - 1:
        raise CanaryError("it was found only after the free list was corrupted")
    return f"stopped a double free of page {page}, and told its history; dump read back"
