"""Proves that the pool-leak tracer works: it must find a page that a small, invented pool lost.

The tracer, the census, the trap and the dump are the real ones; the allocator, the prefix
cache and the scheduler around them are stand-ins.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from g4debug.dumps import reading
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.pool_leak.tracer import PoolLeakTracer
from g4debug.trapping.trap import TrapError

PAGES, PAGE_SIZE = 9, 64


def fire(folder: Path, device: torch.device) -> str:
    """Lose a page, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = PoolLeakTracer(
        Context.alone("pool-leak", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    allocator = SimpleNamespace(
        page_size=PAGE_SIZE,
        size=(PAGES - 1) * PAGE_SIZE,
        free_pages=torch.arange(1, PAGES, device=device),
        release_pages=torch.empty(0, dtype=torch.int64, device=device),
        is_not_in_free_group=True,
    )
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        tree_cache=ChunkCache(),
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.zeros(1, 1, device=device), free_slots=[]
        ),
        server_args=SimpleNamespace(speculative_eagle_topk=1),
    )
    try:
        tracer.check(scheduler, idle=True)
    except TrapError as e:
        raise CanaryError("a sound pool was reported as leaking") from e
    allocator.free_pages = allocator.free_pages[1:]
    try:
        tracer.check(scheduler, idle=True)
    except TrapError as e:
        if e.path is None:
            raise CanaryError(f"it was found, but not dumped: {e.problem}") from e
        (holding,) = reading.read(e.path).holdings
        if holding.pages != (1,):
            raise CanaryError(f"page 1 was lost, but found were pages {holding.pages}") from e
        return "found the page that was lost; dump read back"
    raise CanaryError("a page was lost, but it was not found")


class ChunkCache:
    """A stand-in for SGLang's prefix cache of this name, which holds no pages."""
