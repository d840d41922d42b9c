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

from g4debug.ledger.hooks import LedgerHooks
from g4debug.settings import Settings
from g4debug.tracers.base import CanaryError, Context
from g4debug.tracers.canary import PAGE_SIZE, allocator, found, sound, take
from g4debug.tracers.prefix_cache.tracer import PrefixCacheTracer


class RadixCache(SimpleNamespace):
    """A stand-in for SGLang's prefix cache of this name."""


def fire(folder: Path, device: torch.device) -> str:
    """Exchange two pages, expect the finding and a dump in ``folder``. Returns what was seen."""
    tracer = PrefixCacheTracer(
        Context.alone("prefix-cache", Settings(debug=True, debug_dir=folder), ledger=True)
    )
    ledger, hooks = tracer.ledger, LedgerHooks(tracer.ledger)
    ledger.listen(tracer.listen)
    pool = allocator(device)
    hooks.attach(pool)
    tree = RadixCache(page_size=PAGE_SIZE, token_to_kv_pool_allocator=pool)
    key = SimpleNamespace(
        token_ids=list(range(2 * PAGE_SIZE)), is_bigram=False, extra_key=None, cache_salt=None
    )
    slots = take(pool, 2)
    hooks.allocs.after_alloc(slots, pool, 2 * PAGE_SIZE)
    with sound("a sound prefix cache"):
        tracer.before_insert(tree, SimpleNamespace(key=key, value=slots))
        _match(tracer, tree, key, slots)
    if ledger.broken:
        raise CanaryError(f"the page ledger gave up: {ledger.broken}")
    wrong = torch.cat((slots[PAGE_SIZE:], slots[:PAGE_SIZE]))
    finding = found(lambda: _match(tracer, tree, key, wrong), "an exchange of pages").finding
    if finding.kind != "wrong-page" or finding.location.column != 0:
        raise CanaryError(f"it was found, but told wrong: {finding.headline}")
    return "told two pages that were exchanged; dump read back"


def _match(tracer: PrefixCacheTracer, tree: Any, key: Any, slots: torch.Tensor) -> None:
    result = SimpleNamespace(device_indices=slots, last_device_node=None)
    tracer.after_match(result, tree, SimpleNamespace(key=key, req=None))
    tracer.ledger.settle(wait=True)
