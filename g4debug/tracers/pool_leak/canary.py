"""Proves that the pool-leak tracer works: it must find a page that a small, invented pool lost.

The tracer, the census, the trap and the dump are the real ones; the allocator, the prefix
cache and the scheduler around them are stand-ins.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import allocator, found, sound
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer


def fire(folder: Path, device: torch.device) -> str:
    """Lose a page, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = PoolLeakTracer(
        Context.alone("pool-leak", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    pool = allocator(device, release_pages=torch.empty(0, dtype=torch.int64, device=device))
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=pool,
        tree_cache=ChunkCache(),
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.zeros(1, 1, device=device), free_slots=[]
        ),
        server_args=SimpleNamespace(speculative_eagle_topk=1),
    )
    with sound("a sound pool"):
        tracer.check(scheduler, idle=True)
    pool.free_pages = pool.free_pages[1:]
    (holding,) = found(lambda: tracer.check(scheduler, idle=True), "a lost page").holdings
    if holding.pages != (1,):
        raise CanaryError(f"page 1 was lost, but found were pages {holding.pages}")
    return "found the page that was lost; dump read back"


class ChunkCache:
    """A stand-in for SGLang's prefix cache of this name, which holds no pages."""
