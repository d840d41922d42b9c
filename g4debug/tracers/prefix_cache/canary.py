"""Proves that the prefix-cache tracer works: it must tell pages that are exchanged in a small,
invented prefix cache.

The tracer, the ledger and its hooks, the trap and the dump are the real ones. The allocator and the
prefix cache are stand-ins. No SGLang is needed, and no server is touched.
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
from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer
from g4debug.trapping.trap import TrapError

PAGES, PAGE_SIZE = 9, 64


class RadixCache(SimpleNamespace):
    """A stand-in for SGLang's prefix cache of this name."""


def fire(folder: Path, device: torch.device) -> str:
    """Exchange two pages, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = PrefixCacheTracer(
        Context.alone("prefix-cache", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    ledger, hooks = tracer.ledger, LedgerHooks(tracer.ledger)
    ledger.listen(tracer.listen)
    pool = SimpleNamespace(
        page_size=PAGE_SIZE,
        size=(PAGES - 1) * PAGE_SIZE,
        device=device,
        free_pages=torch.arange(1, PAGES, device=device),
        is_not_in_free_group=True,
    )
    hooks.attach(pool)
    tree = RadixCache(page_size=PAGE_SIZE, token_to_kv_pool_allocator=pool)
    key = SimpleNamespace(
        token_ids=list(range(2 * PAGE_SIZE)), is_bigram=False, extra_key=None, cache_salt=None
    )
    pool.free_pages = pool.free_pages[2:]
    slots = torch.arange(PAGE_SIZE, 3 * PAGE_SIZE, device=device)
    hooks.allocs.after_alloc(slots, pool, 2 * PAGE_SIZE)
    try:
        tracer.before_insert(tree, SimpleNamespace(key=key, value=slots))
        _match(tracer, tree, key, slots)
    except TrapError as e:
        raise CanaryError(f"a sound prefix cache was reported: {e.finding.headline}") from e
    if ledger.broken:
        raise CanaryError(f"the page ledger gave up: {ledger.broken}")
    try:
        _match(tracer, tree, key, torch.cat((slots[PAGE_SIZE:], slots[:PAGE_SIZE])))
    except TrapError as e:
        if e.path is None:
            raise CanaryError(f"it was found, but not dumped: {e.problem}") from e
        found = reading.read(e.path).finding
        if found.kind != "wrong-page" or found.location.column != 0:
            raise CanaryError(f"it was found, but told wrong: {found.headline}") from e
        return "told two pages that were exchanged; dump read back"
    raise CanaryError("pages were exchanged, but that was not found")


def _match(tracer: PrefixCacheTracer, tree: Any, key: Any, slots: torch.Tensor) -> None:
    result = SimpleNamespace(device_indices=slots, last_device_node=None)
    tracer.after_match(result, tree, SimpleNamespace(key=key, req=None))
    tracer.ledger.settle(wait=True)
