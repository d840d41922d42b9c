"""Proves that the kv-allocator tracer works: it must stop a double free in a small, invented pool.

The tracer, the ledger and its hooks, the trap and the dump are the real ones. The allocator is a
stand-in with SGLang's free list. No SGLang is needed, and no server is touched.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from g4debug.dumps import reading
from g4debug.ledger.hooks import LedgerHooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.kv_allocator.tracer import KvAllocatorTracer
from g4debug.trapping.trap import TrapError

PAGES, PAGE_SIZE = 9, 64


def fire(folder: Path, device: torch.device) -> str:
    """Free pages twice, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = KvAllocatorTracer(
        Context.alone("kv-allocator", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    ledger, hooks = tracer.ledger, LedgerHooks(tracer.ledger)
    ledger.listen(tracer.listen)
    pool = _pool(device)
    hooks.attach(pool)
    try:
        tokens = _alloc(hooks, pool, 3)
        _free(hooks, pool, tokens)
        tokens = _alloc(hooks, pool, 2)
        _free(hooks, pool, tokens)
    except TrapError as e:
        raise CanaryError(f"a sound allocator was reported as broken: {e.finding.headline}") from e
    if ledger.broken:
        raise CanaryError(f"the page ledger gave up: {ledger.broken}")
    try:
        _free(hooks, pool, tokens)
    except TrapError as e:
        if e.path is None:
            raise CanaryError(f"it was found, but not dumped: {e.problem}") from e
        record = reading.read(e.path)
        page = int(tokens[0]) // PAGE_SIZE
        kinds = [event.kind for event in record.events if event.pages[0] == page]
        if record.finding.kind != "double-free" or kinds[-3:] != ["alloc", "free", "free"]:
            raise CanaryError(
                f"it was found, but the report is wrong: {e.finding.headline}, {kinds}"
            ) from e
        if len(pool.free_pages) != PAGES - 1:
            raise CanaryError("it was found only after the free list was corrupted") from e
        return f"stopped a double free of page {page}, and told its history; dump read back"
    raise CanaryError("pages were freed twice, but that was not found")


def _pool(device: torch.device) -> Any:
    return SimpleNamespace(
        page_size=PAGE_SIZE,
        size=(PAGES - 1) * PAGE_SIZE,
        device=device,
        free_pages=torch.arange(1, PAGES, device=device),
        is_not_in_free_group=True,
    )


def _alloc(hooks: LedgerHooks, pool: Any, pages: int) -> torch.Tensor:
    """Allocate as PagedTokenToKVPoolAllocator.alloc does, and call the ledger's hook after it."""
    taken, pool.free_pages = pool.free_pages[:pages], pool.free_pages[pages:]
    offsets = torch.arange(PAGE_SIZE, device=taken.device)
    found: torch.Tensor = (taken[:, None] * PAGE_SIZE + offsets).reshape(-1)
    hooks.allocs.after_alloc(found, pool, pages * PAGE_SIZE)
    return found


def _free(hooks: LedgerHooks, pool: Any, tokens: torch.Tensor) -> None:
    """Free as PagedTokenToKVPoolAllocator does, with the ledger's hook around it."""

    def release(pool: Any, pages: torch.Tensor) -> None:
        pool.free_pages = torch.cat((pages, pool.free_pages))

    hooks.frees.around_release(release, pool, torch.unique(tokens // PAGE_SIZE))
